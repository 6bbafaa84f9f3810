package egress

// StatusOf is the table of failures, for tests.
var StatusOf = statusOf
