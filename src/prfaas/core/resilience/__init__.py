"""What to do with parts that fail: circuit breakers, hedging, retry budgets, quarantine."""
