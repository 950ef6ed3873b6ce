"""Fewstep: distil a diffusion or flow-matching teacher into a one- to eight-step student."""
