"""A few-step Stable Diffusion 3 pipeline for plain diffusers; needs nothing of Fewstep."""

from functools import partial

import torch
from diffusers import StableDiffusion3Pipeline


class FewStepPipeline(StableDiffusion3Pipeline):
    """The stock pipeline, by default on the sigmas that the student was trained on, unguided."""

    # A network on pixels has no autoencoder, and may have an encoder of another kind.
    _optional_components = [  # noqa: RUF012
        *("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        *("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"),
    ]

    def __init__(
        self,
        transformer,
        scheduler,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
        image_encoder=None,
        feature_extractor=None,
        sigmas=None,
        sample_size=None,
        max_sequence_length=256,
    ):
        """`sigmas` and what follows: as it was trained, from the export's model_index.json."""
        super().__init__(
            transformer,
            scheduler,
            vae,
            text_encoder,
            tokenizer,
            text_encoder_2,
            tokenizer_2,
            text_encoder_3,
            tokenizer_3,
            image_encoder,
            feature_extractor,
        )
        self.register_to_config(
            sigmas=sigmas, sample_size=sample_size, max_sequence_length=max_sequence_length
        )
        self.default_sample_size = sample_size or self.default_sample_size

    @torch.no_grad()
    def __call__(self, prompt=None, *, generator=None, **options):
        """As the stock pipeline; `generator` also makes the noise of the steps after the first."""
        if options.get("sigmas") is None:
            options["sigmas"] = list(self.config.sigmas)
        steps = options.setdefault("num_inference_steps", len(options["sigmas"]))
        if steps != len(options["sigmas"]):
            raise ValueError(f"this student was trained for {len(options['sigmas'])} steps")
        options.setdefault("guidance_scale", 1.0)
        options.setdefault("max_sequence_length", self.config.max_sequence_length)
        options.setdefault("output_type", "latent" if self.vae is None else "pil")
        # The stock pipeline does not hand its generator on to the scheduler.
        self.scheduler.step = partial(self.scheduler.step, generator=generator)
        try:
            return super().__call__(prompt, generator=generator, **options)
        finally:
            del self.scheduler.step
