"""Stock scripts, which contain nothing of zeroshard, and the process that runs them."""
