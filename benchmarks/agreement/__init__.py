"""Planner and simulator on random plans: do they agree?"""
