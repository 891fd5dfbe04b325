"""The doors into trainers of other libraries. Each module here needs its library; nothing else of zeroshard imports one."""
