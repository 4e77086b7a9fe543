import torch
from hypothesis import settings

torch.set_num_threads(1)  # as the service does on a CPU, and the test machine is shared
settings.register_profile("no deadline", deadline=None)  # nothing here asserts on wall time
settings.load_profile("no deadline")
