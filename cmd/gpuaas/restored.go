package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/internal/pg/schema"
)

// afterRestore is the text about what to do after a restore was declared.
const afterRestore = `rollback mode is active: nothing is launched, dispatched, recreated, released or put on hold
	until it is accepted
next:
  1. start the services; nodes connect, and running workloads go on
  2. look at what was lost: gpuaas rollback status, gpuaas findings list, gpuaas instances list, gpuaas nodes list
	(docs/restore.md)
  3. gpuaas rollback accept --reason TEXT
`

func newRestoredCommand(file, ownerURL *string) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "restored", Short: "Declare that the database was restored from a backup", Args: noArgs,
		Long: "migrate restored raises the era, so that no number of the lost history is given twice, and sets rollback\n" +
			"mode, in one transaction. Run it once after each restore, with all services stopped; while one is connected it\n" +
			"refuses. docs/restore.md has all the steps.",
		Example: "  gpuaas migrate restored --config migrate.yaml --reason 'disk lost; dump of 03:00 restored'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if strings.TrimSpace(reason) == "" {
				return exit.Usage(errors.New("migrate restored needs --reason TEXT: it goes into the record"))
			}
			m, err := readMigration(*file, *ownerURL)
			if err != nil {
				return err
			}
			state, err := schema.DeclareRestored(cmd.Context(), m.url, strings.TrimSpace(reason))
			if err != nil {
				return reached(err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "the era is %d now\n%s", state.Era, afterRestore)
			return err
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "what happened and which backup was restored, for the record (required)")
	return cmd
}

// writeRollback prints the era and the mode, or nothing for a database whose schema has neither yet.
func writeRollback(ctx context.Context, cmd *cobra.Command, ownerURL string) error {
	state, known, err := schema.RollbackStatus(ctx, ownerURL)
	if err != nil || !known {
		return err
	}
	mode := "none"
	if state.Active {
		mode = "active since " + state.Since.UTC().Format(time.RFC3339)
		if !state.Declared {
			mode += ", set on evidence: the restore was not declared (run `gpuaas migrate restored --reason TEXT` with all " +
				"services stopped)"
		}
		mode += "; it ends with `gpuaas rollback accept --reason TEXT`"
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "\nera: %d, since %s by %s (%s)\nrollback mode: %s\n", state.Era,
		state.RaisedAt.UTC().Format(time.RFC3339),
		state.RaisedBy, state.Reason, mode)
	return err
}
