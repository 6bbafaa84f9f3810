package template

// Together has a command end with what it starts.
var Together = together
