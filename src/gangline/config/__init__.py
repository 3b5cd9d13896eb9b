"""What did the user write? `job.yaml`, `cluster.yaml` and hostfiles, turned into the types of `gangline.runs`."""
