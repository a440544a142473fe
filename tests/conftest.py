"""Before torch is imported: idle threads sleep, so that a busy machine does not slow small tensors a hundredfold."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
