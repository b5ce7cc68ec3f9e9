"""The choice by cost against choices by price and by speed, simulated and live."""
