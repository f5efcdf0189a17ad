package kit

// For the tests that walk all commands, which this package does not know.
var (
	FlagName = flagName
	FlagOf   = flagOf
)
