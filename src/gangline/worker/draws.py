"""Where what is drawn at random begins: dropout's masks, of every micro-batch anew."""

import torch


def begin_draws(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, on the processor and, where ranks compute there, on GPUs.

    That function looks for devices of all kinds; without a GPU it writes down its caller's stack each time, which takes
    up to 0.6 ms: as long as other parts of a pass through a small stage.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
