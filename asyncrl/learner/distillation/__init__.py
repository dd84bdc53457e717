"""A teacher: divergences of the policy from it, and what a teacher must share with the policy."""
