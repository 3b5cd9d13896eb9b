"""What will be done? From hosts that were inspected and a job to a plan."""
