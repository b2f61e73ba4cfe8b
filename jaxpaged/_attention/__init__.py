"""The attention function: checks, the choice of an implementation, and the implementations."""
