"""Shares devices among jobs: policies, a simulator, and live runs."""
