"""Stages with devices and plans of their own: cut exactly, over tables."""

from jscaler.plan_search.stages.stage_cuts import CutStages, StageCuts

__all__ = ["CutStages", "StageCuts"]
