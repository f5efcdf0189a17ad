package kit

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// ReasonFlag adds --reason, which is required if needed is set.
func ReasonFlag(cmd *cobra.Command, reason *string, needed bool) {
	text := "why, in words, for the record"
	if needed {
		text += " (required)"
	}
	cmd.Flags().StringVar(reason, "reason", "", text)
	if needed {
		NeedsReason(cmd, reason)
	}
}

// dryReason is the reason of a dry run without one: requests must have a reason, and that of a dry run is recorded
// nowhere.
const dryReason = "dry run"

// NeedsReason refuses a command without --reason before a request is sent. A dry run does not need one.
func NeedsReason(cmd *cobra.Command, reason *string) *cobra.Command {
	next := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if strings.TrimSpace(*reason) == "" && dryRun(cmd) {
			*reason = dryReason
		}
		if strings.TrimSpace(*reason) != "" {
			return next(cmd, args)
		}
		text := ""
		if cmd.Flags().Lookup("dry-run") != nil {
			text = " (or --dry-run, to see what it would do)"
		}
		return fault.New(commonv1.Reason_REASON_REASON_REQUIRED,
			cmd.CommandPath()+" needs --reason TEXT, which is written into the audit log"+text,
			fault.Remedy("give one with --reason"))
	}
	return cmd
}

// UnknownCommand returns the error for a subcommand that cmd does not have, with similar names as suggestions.
func UnknownCommand(cmd *cobra.Command, name string) error {
	text := fmt.Sprintf("unknown command %q of %q", name, cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = max(cmd.SuggestionsMinimumDistance, 2)
	if near := cmd.SuggestionsFor(name); len(near) > 0 && name != "" {
		slices.SortStableFunc(near, func(a, b string) int { // those that begin alike come first
			return strings.Index(b[:1], name[:1]) - strings.Index(a[:1], name[:1])
		})
		text += ": did you mean " + strings.Join(near, " or ") + "?"
	}
	return exit.Usage(errors.New(text))
}

// Group returns a command that only has subcommands.
func Group(use, short string, aliases []string, subs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Aliases: aliases, Example: firstExamples(subs),
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return UnknownCommand(cmd, args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := make([]string, 0, len(cmd.Commands()))
			for _, sub := range cmd.Commands() {
				if sub.IsAvailableCommand() {
					names = append(names, sub.Name())
				}
			}
			return exit.Usage(fmt.Errorf("%s needs one of: %s", cmd.CommandPath(), strings.Join(names, ", ")))
		},
	}
	cmd.AddCommand(subs...)
	return cmd
}

// firstExamples returns the first example of each command.
func firstExamples(cmds []*cobra.Command) string {
	lines := make([]string, 0, len(cmds))
	for _, cmd := range cmds {
		line, _, _ := strings.Cut(cmd.Example, "\n")
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// Args returns a check for exactly these arguments, which its errors name.
func Args(names ...string) cobra.PositionalArgs { return ArgsFrom(len(names), names...) }

// ArgsFrom returns a check for these arguments, of which only the first ones are needed. Its errors name them.
func ArgsFrom(needed int, names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		if len(given) < needed {
			return exit.Usage(fmt.Errorf("%s needs %s", cmd.CommandPath(), strings.Join(names[len(given):needed], " and ")))
		}
		if len(given) > len(names) {
			return exit.Usage(fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), given[len(names)]))
		}
		for i, value := range given {
			if strings.TrimSpace(value) == "" {
				return exit.Usage(fmt.Errorf("%s: %s is empty", cmd.CommandPath(), names[i]))
			}
		}
		return nil
	}
}

// EnumFlag adds a flag that takes a value of E, with the values in its text and its completion. See ParseEnum.
func EnumFlag[E protoreflect.Enum](cmd *cobra.Command, value *string, name, text string) {
	all := names.Spellings[E]()
	cmd.Flags().StringVar(value, name, "", fmt.Sprintf(text, strings.Join(all, ", ")))
	_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(all, cobra.ShellCompDirectiveNoFileComp))
}

// ParseEnum reads the value of a flag; the empty one is unspecified.
func ParseEnum[E protoreflect.Enum](flag, value string) (E, error) {
	var zero E
	if value == "" {
		return zero, nil
	}
	e, err := names.Parse[E](value)
	if err != nil {
		return zero, exit.Usage(fmt.Errorf("--%s %q is none of %s", flag, value, strings.Join(names.Spellings[E](), ", ")))
	}
	return e, nil
}
