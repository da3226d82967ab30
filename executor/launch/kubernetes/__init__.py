"""Manifests of jobs for Kubernetes, and their schemas."""
