"""The frozen teacher: on ranks of its own, or on the student's.

From the launch to a batch of hidden states:

- ``worlds``: which ranks are the student's and which the teacher's; each role gets its own default process group.
- ``files``, ``layout``, ``check``: a Qwen3 on disk, what its files must hold, and whether it fits the student.
- ``model``: torchtitan's Qwen3 with these weights, whole or sharded.
- ``bridge``: messages between one student rank and one teacher rank.
- ``server``: the teacher world's main loop.
- ``client``: what the student's trainer sees, the same for a separate and a colocated teacher.
"""
