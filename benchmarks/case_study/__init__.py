"""The paper's case study, live: timing engines over the WAN lab, beside planner and simulator."""
