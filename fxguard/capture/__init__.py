"""From Python to graphs: the only place of ``torch._dynamo`` and ``torch._inductor``.

**In**: a forward.

**Out**: checked graphs, handed to a backend, which report each of their runs.
"""
