"""The documents of a run: ``source`` says what document i is, ``batches`` which of them a step and a rank train on."""
