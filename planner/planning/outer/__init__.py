"""Around the recipes of a step: replicas, stages, a padded batch, loops to compare recipes on."""
