"""From response text to reward: extract the answer, judge it, never let a failure look like 0."""
