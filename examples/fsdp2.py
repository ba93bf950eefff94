"""Training with FSDP2 that goes on after whatever happens to it:

torchrun --nproc_per_node 2 examples/fsdp2.py

Kill it, and start it again with as many ranks as you like. Each rank writes its shards of
parameters and moments, and reads those that it has then; generators and data position are each
rank's own.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asymcheck import Checkpointer


class Batches:
    """A stream of samples that the ranks share; the position counts those of all ranks."""

    def __init__(self, rank, ranks, batch=8):
        self.rank, self.ranks, self.batch, self.position = rank, ranks, batch, 0

    def __next__(self):
        first = self.position + self.rank * self.batch
        self.position += self.ranks * self.batch
        made = [torch.Generator().manual_seed(n) for n in range(first, first + self.batch)]
        return torch.stack([torch.randn(32, generator=generator) for generator in made])

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--root", default="runs/examples/fsdp2")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)  # the same weights on each rank
    layers = [nn.Linear(32, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 32)]
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for unit in (model[0], model[3], model):
        fully_shard(unit, mesh=mesh)
        if not cuda:
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(rank, ranks)
    torch.manual_seed(1 + rank)  # and another dropout

    state = {"model": model, "optim": optimizer, "data": batches}
    with Checkpointer(options.root, state=state, every_steps=10, keep_last=3) as checkpointer:
        start = checkpointer.restore()
        if rank == 0 and start:
            print(f"resumed from step {start} on {ranks} ranks", flush=True)
        for step in range(start + 1, options.steps + 1):
            inputs = next(batches).to(device)
            loss = (model(inputs) - inputs.square()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step)
            if step % 10 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {step}: loss {mean.item() / ranks:.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
