"""Roles: what a set of weights is for, where it lives and who may change it."""
