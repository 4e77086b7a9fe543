import torch

torch.set_num_threads(1)  # as the service does on a CPU, and the test machine is shared
