"""Fine-tuning that keeps what a model knows, without its old data: it needs torch and nothing else.

Where to find what:

- `protection`: `protect()` and what it returns
- `anchors`: the known inputs, cut into batches
- `teacher`: the model's former self; `answers`: what it answered, and KL(before ‖ now);
  `last_product`: what the last layer makes answers of
- `captured`: the teacher's pass as a CUDA graph; `pending`: its loss, while the GPU computes it;
  `gradients`: those that are known before a backward pass
- `start`: the weights before training, to interpolate with and to answer with again
- `samples`: texts that a language model writes itself
- `processes`: one protection for all processes of DDP and FSDP2
- `report`: what was kept; `refusals`: what is refused, and warned of
- `memory_plan`: what `protect` will take of memory, from shapes
"""

from syngap.protection.memory_plan import MemoryPlan, plan_memory
from syngap.protection.protection import Protection, protect
from syngap.protection.report import Report
from syngap.protection.samples import own_samples

__all__ = ["MemoryPlan", "Protection", "Report", "own_samples", "plan_memory", "protect"]
