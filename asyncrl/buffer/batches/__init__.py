"""The batches: which groups make one, what its outcome means, what a resumed learner redoes, what the disk lost."""
