"""Whether all processes of a job do the same; compared before the first step."""
