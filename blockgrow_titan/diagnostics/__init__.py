"""What happens inside a student: residual statistics, block removal, logit lens, gradient norms, transitions.

batch.py        the fixed batch: documents, micro-batches, which positions count
token_types.py  document boundary, newline, punctuation, regular
statistics.py   numbers of one tensor: RMS, quantiles, kurtosis, histogram, angular distance
probes.py       walks a model's parts over the batch
gradients.py    gradient norm of each block
recorder.py     one record (a line of diagnostics.jsonl), and what TensorBoard shows of it
checkpoints.py  the same record for saved students (tools/diagnose.py)
tables.py       records side by side, for the console
transitions.py  jump, area and recovery of the training loss around a phase change
"""
