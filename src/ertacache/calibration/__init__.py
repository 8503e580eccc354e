"""From a pipeline to a policy: profile, solve, refit, validate. Runs models, draws nothing."""
