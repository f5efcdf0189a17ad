package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

// KeyView is how signing keys are printed.
var KeyView = output.View[*recoveryv1.SigningKey]{
	Name: (*recoveryv1.SigningKey).GetKeyId,
	Columns: []output.Column[*recoveryv1.SigningKey]{
		{Title: "KIND", Path: "kind"},
		{Title: "KEY", Path: "key_id"},
		{Title: "STATE", Path: "state"},
		{Title: "SINCE", Drop: 1, Moves: true, Path: "since"},
		{Title: "HELD BY", Drop: 2, Of: func(_ *output.Printer, k *recoveryv1.SigningKey) string {
			return heldBy(k.GetHeldBy())
		}},
		{Title: "NEEDED BY", Text: true, Path: "needed_by"},
		{Title: "FILE", Path: "file", Wide: true},
		{Title: "MADE", Path: "made_at", Wide: true},
	},
}

// KeyProblemColumns are the columns of the problems of signing keys.
var KeyProblemColumns = []output.Column[*recoveryv1.KeyProblem]{
	{Title: "REPLICA", Of: func(_ *output.Printer, p *recoveryv1.KeyProblem) string {
		return p.GetService() + " " + p.GetReplicaId()
	}},
	{Title: "PROBLEM", Text: true, Path: "problem"},
}

// RotationView is how the answer to a rotation of a key is printed.
var RotationView = output.View[*recoveryv1.RotateKeyResponse]{
	Name: (*recoveryv1.RotateKeyResponse).GetRotationId,
	Columns: []output.Column[*recoveryv1.RotateKeyResponse]{
		{Title: "KIND", Path: "kind"},
		{Title: "ROTATION", Path: "rotation_id"},
		{Title: "KEY", Path: "key_id"},
		{Title: "REQUESTED", Path: "requested_at"},
	},
}

// heldBy returns the number of replicas of each service that have a key.
func heldBy(replicas []string) string {
	var order []string
	count := map[string]int{}
	for _, replica := range replicas {
		service, _, _ := strings.Cut(replica, " ")
		if count[service] == 0 {
			order = append(order, service)
		}
		count[service]++
	}
	for i, service := range order {
		order[i] = fmt.Sprintf("%s %d", service, count[service])
	}
	return strings.Join(order, ", ")
}

// KeysCommand returns the commands about signing keys.
func KeysCommand(p *kit.Program) *cobra.Command {
	return kit.Group("keys", "The keys that services sign with, and their rotation", []string{"key"}, keysList(p),
		keysRotate(p))
}

func keysList(p *kit.Program) *cobra.Command {
	var page kit.Paging
	cmd := &cobra.Command{
		Use: "list", Short: "List the signing keys with their states, the replicas that hold them, and what still needs them",
		Long: "List the signing keys. A key is verify_only until each replica that must verify with it holds it, and of " +
			"task_signing each agent,\n" +
			"then signing; the one before is verifying_after until nothing that it signed is outstanding, then retired " +
			"(docs/keys.md). Under\n" +
			"the list stand the files that replicas refuse. Live replicas are those that have reported within 30 s. The keys " +
			"of services are the\n" +
			"issuers of services' certificates; the one before the present is needed while a replica shows a certificate of it.",
		Example: "  gpuaas keys list\n  gpuaas keys list -o json --jq '.items[] | select(.state == \"signing\") | .key_id'",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			if page.Watch {
				return kit.Show(ctx, s, page, kit.Source[*recoveryv1.SigningKey]{View: KeyView, Fetch: kit.Whole(
					func(ctx context.Context) ([]*recoveryv1.SigningKey, error) {
						answer, err := s.Client.Keys.ListKeys(ctx, &readmodelv1.ListKeysRequest{})
						return answer.GetKeys(), err
					})})
			}
			answer, err := s.Client.Keys.ListKeys(ctx, &readmodelv1.ListKeysRequest{})
			if err != nil {
				return err
			}
			err = output.List(s.Printer, KeyView, answer.GetKeys(), "",
				output.With("problems", output.Messages(answer.GetProblems()...)))
			return output.Under(s.Printer, err, KeyProblemColumns, answer.GetProblems())
		}),
	}
	page.WatchFlag(cmd)
	return cmd
}

// issuerSteps are the manual steps to introduce the next issuer of services.
var issuerSteps = []string{
	"make the next issuer, and a cross certificate: one for its key and name, issued by the present issuer",
	"add both certificates to tls.ca_file of each replica of lifecycle, behind what is there; the other services learn " +
		"them from the set",
	"wait until `gpuaas keys list` shows the issuer as signing",
	"replace tls.cert_file and tls.key_file of each service by a certificate of the next issuer; one that comes too " +
		"early is not shown",
	"wait until `gpuaas keys list` shows the issuer before as retired, and take it out of each tls.ca_file and of " +
		"profile.ca_file",
}

func keysRotate(p *kit.Program) *cobra.Command {
	req := &readmodelv1.RotateKeyRequest{}
	cmd := &cobra.Command{
		Use: "rotate KIND", Short: "Ask for the next key of a kind; it signs once each replica holds it",
		Long: "Ask for the next key of a kind: " + strings.Join(names.Spellings[recoveryv1.KeyKind](), ", ") +
			". The service that signs makes it within seconds, and\n" +
			"`gpuaas keys list` shows how far it is. Nothing is restarted. Where replicas have directories of their own, " +
			"copy the new file to each:\n" +
			"the key does not sign before. The key of task_signing waits for the agents that are connected too, and for " +
			"those of an earlier build,\n" +
			"which cannot learn it: NEEDED BY names them. A second rotation is refused until the first is through. The " +
			"former key of recovery_token\n" +
			"verifies as long as a node may use a token of it. No service has the key of the\n" +
			"issuer of services: for that kind the command prints which files to replace, and in what order. Needs the role " +
			"security.",
		Example: "  gpuaas keys rotate join_state --reason 'yearly' --dry-run\n  gpuaas keys rotate assertion --reason 'a " +
			"laptop was lost'",
		Args: kit.Args("KIND"), ValidArgs: names.Spellings[recoveryv1.KeyKind](),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			kind, err := names.Parse[recoveryv1.KeyKind](args[0])
			if err != nil {
				return exit.Usage(fmt.Errorf("KIND is one of %s, not %q",
					strings.Join(names.Spellings[recoveryv1.KeyKind](), ", "), args[0]))
			}
			req.Kind, req.IdempotencyKey = kind, cmp.Or(req.GetIdempotencyKey(), ids.New())
			answer, err := s.Client.Keys.RotateKey(ctx, req)
			if err != nil {
				return err
			}
			if err := output.One(s.Printer, RotationView, answer.GetRotation()); err != nil {
				return err
			}
			if kind == recoveryv1.KeyKind_KEY_KIND_SERVICES {
				for i, step := range issuerSteps {
					human.Note(s.Err, "%d. %s", i+1, step)
				}
				human.Note(s.Err, "for a mesh of dev, cluster or compose: `gpuaas issuer next --dir DIR` does 1 and 2, `issuer "+
					"renew` 4, `issuer forget` the last part of 5")
			}
			if req.GetDryRun() {
				human.Note(s.Err, "nothing was changed: the next key of %s can be asked for", args[0])
			}
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.BoolVar(&req.DryRun, "dry-run", false, "only check whether it can be asked for")
	flags.StringVar(&req.IdempotencyKey, "idempotency-key", "",
		"a repeated request with the same `key` gets the same rotation")
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}
