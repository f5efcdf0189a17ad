package kit

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
)

// takes has, by the type of a flag, the text about a value that it does not take.
var takes = map[string]string{
	"int": "is not a whole number", "int32": "is not a whole number", "int64": "is not a whole number",
	"uint64": "is not a whole number of 0 or more", "duration": "is not a duration such as 500ms, 30s or 5m",
	"bool": "is neither true nor false",
}

// FlagError replaces the parser's error about a flag of cmd with one that names the flag and what it takes, without
// the names of the functions that parse it.
func FlagError(cmd *cobra.Command, err error) error {
	help := fmt.Sprintf("`%s --help` lists its flags", cmd.CommandPath())
	if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := "--" + e.GetSpecifiedName()
		if group := e.GetSpecifiedShortnames(); group != "" {
			name = "-" + group
			if group[0] >= '0' && group[0] <= '9' { // the parser takes -5 for short flags
				help = fmt.Sprintf("an argument that begins with a dash stands after --; %s", help)
			}
		}
		return exit.UsageHint(fmt.Errorf("unknown flag %s of %q", name, cmd.CommandPath()), help)
	}
	if e, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return exit.UsageHint(fmt.Errorf("--%s needs a value", e.GetFlag().Name), described(e.GetFlag()))
	}
	e, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return exit.UsageHint(err, help)
	}
	flag, wrong, hint := e.GetFlag(), takes[e.GetFlag().Value.Type()], described(e.GetFlag())
	switch {
	case errors.Is(err, strconv.ErrRange):
		wrong = "is out of range"
		nearer := "smaller"
		if strings.HasPrefix(e.GetValue(), "-") {
			nearer = "larger"
		}
		hint = fmt.Sprintf("give a %s number; %s", nearer, hint)
	case wrong == "":
		return exit.UsageHint(err, hint)
	}
	return exit.UsageHint(fmt.Errorf("--%s %q %s", flag.Name, e.GetValue(), wrong), hint)
}

// WrongFlag returns the error about the value of a flag, with the flag's description as what to give instead.
func WrongFlag(flags *pflag.FlagSet, name, text string) error {
	return exit.UsageHint(errors.New("--"+name+" "+text), described(flags.Lookup(name)))
}

// described returns a flag with its description.
func described(flag *pflag.Flag) string {
	_, usage := pflag.UnquoteUsage(flag)
	return fmt.Sprintf("--%s: %s", flag.Name, usage)
}
