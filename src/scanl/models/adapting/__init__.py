"""A trained model made into another: first states, soft prompts, whole-number weights, distillation."""
