"""Call different collectives in two ranks; started by test_staged_backend.py."""

import torch
import torch.distributed as dist

from crosstune.torch_engine.sharding.staged_backend import register_staged_backend

dist.set_debug_level_from_env()  # torch was imported before the variable was set
register_staged_backend()
dist.init_process_group("staged")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2))
else:
    dist.broadcast(torch.ones(2), src=1)
