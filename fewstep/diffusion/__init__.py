"""The mathematics of diffusion and distribution matching, as pure functions of tensors."""
