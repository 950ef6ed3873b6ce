"""A class-conditional few-step pipeline for plain diffusers; needs nothing of Fewstep."""

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.torch_utils import randn_tensor


class FewStepPipeline(DiffusionPipeline):
    """Samples a distilled student on the sigmas that it was trained on, without guidance."""

    def __init__(self, transformer, scheduler, sigmas=None):
        """`sigmas`: the trained grid, from the export's model_index.json."""
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.register_to_config(sigmas=sigmas)

    @torch.no_grad()
    def __call__(self, class_labels, generator=None):
        """Images [N, C, H, W] in [-1, 1], one for each label."""
        network = self.transformer
        labels = torch.as_tensor(class_labels, device=network.device)
        size = network.config.sample_size
        shape = (len(labels), network.config.in_channels, size, size)
        x = randn_tensor(shape, generator, device=network.device, dtype=network.dtype)
        self.scheduler.set_timesteps(sigmas=self.config.sigmas, device=network.device)
        for t in self.scheduler.timesteps:
            v = network(x, t.expand(len(x)), labels).sample
            x = self.scheduler.step(v, t, x, generator=generator).prev_sample
        return x
