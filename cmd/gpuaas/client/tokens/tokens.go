package tokens

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
)

// View is how recovery tokens are printed.
var View = output.View[*recoveryv1.RecoveryToken]{
	Name: (*recoveryv1.RecoveryToken).GetTokenId,
	Columns: []output.Column[*recoveryv1.RecoveryToken]{
		{Title: "TOKEN", ID: true, Path: "token_id"},
		{Title: "NODE", ID: true, Path: "node_name|node_id"},
		{Title: "STATE", Path: "state"},
		{Title: "ENDED BY", Drop: 1, Path: "ended_by"},
		{Title: "PROFILE", Drop: 3, Path: "profile"},
		{Title: "ISSUED", Drop: 4, Path: "issued_at"},
		{Title: "COUNTED SINCE", Drop: 2, Path: "counted_since"},
		{Title: "GOOD UNTIL", Path: "good_until"},
		{Title: "SERIAL", Path: "serial", Wide: true},
		{Title: "USED FOR", Path: "used_serial", Wide: true},
		{Title: "NODE INSTANCE", Path: "node_instance_id", Wide: true},
		{Title: "FAMILY", Path: "family", Wide: true},
	},
}

// ExtensionView is how an extension is printed.
var ExtensionView = output.View[*recoveryv1.TokenExtension]{
	Name: (*recoveryv1.TokenExtension).GetExtensionId,
	Columns: []output.Column[*recoveryv1.TokenExtension]{
		{Title: "PROFILE", Path: "profile"},
		{Title: "UNTIL", Path: "until"},
		{Title: "REASON", Text: true, Path: "reason"},
		{Title: "BY", Path: "by"},
		{Title: "AT", Path: "at"},
	},
}

// Command returns the commands about recovery tokens.
func Command(p *kit.Program) *cobra.Command {
	return kit.Group("tokens", "Recovery tokens, with which nodes enrol again by themselves", []string{"token"},
		listCommand(p), revokeCommand(p), extendCommand(p))
}

func listCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	var node string
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List recovery tokens, the newest first, with their states and until when they are good",
		Long: "List recovery tokens. A token is issued, used or revoked; ENDED BY is what ended it: replaced by a later\n" +
			"one, reuse with a second key, an operator, another enrolment of the node, or its retirement. COUNTED SINCE is\n" +
			"the first session on the certificate that came with the token: from then on it ages. GOOD UNTIL follows from\n" +
			"node.recovery_token_max_age_seconds, our own outages and extensions. The text of a token is kept nowhere.",
		Example: "  gpuaas tokens list --node node-1\n" +
			"  gpuaas tokens list -o json --jq '.items[] | select(.state == \"issued\")'",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			id := ""
			if node != "" {
				var err error
				if id, err = s.Find(ctx, kit.KindNode, node); err != nil {
					return err
				}
			}
			return kit.Show(ctx, s, page, kit.Source[*recoveryv1.RecoveryToken]{
				View: View, Fetch: kit.Method(s.Client.Tokens.ListTokens, &readmodelv1.ListTokensRequest{NodeId: id}),
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().StringVar(&node, "node", "", "only those of this node")
	_ = cmd.RegisterFlagCompletionFunc("node", p.CompleteNodes)
	return cmd
}

func revokeCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.RevokeTokensRequest{}
	var node string
	cmd := &cobra.Command{
		Use: "revoke [TOKEN] --reason TEXT", Short: "Revoke a recovery token, or all of a node",
		Long: "Revoke a recovery token, or with --node all of a node. The node keeps its certificate and its session, and\n" +
			"gets another token with its next renewal. Without a token it cannot come back by itself once its certificate\n" +
			"has ended: it needs a bundle. Needs the role operator or security.",
		Example: "  gpuaas tokens revoke --node node-1 --reason 'its disk was lost'",
		Args:    kit.ArgsFrom(0, "TOKEN"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			if (len(args) == 1) == (node != "") {
				return exit.Usage(errors.New("gpuaas tokens revoke needs TOKEN, or --node NODE for all tokens of a node"))
			}
			if node != "" {
				id, err := s.ID(ctx, kit.KindNode, node)
				if err != nil {
					return err
				}
				req.NodeId = id
			} else {
				id, err := tokenID(ctx, s, args[0])
				if err != nil {
					return err
				}
				req.TokenId = id
			}
			answer, err := s.Client.Tokens.RevokeTokens(ctx, req)
			if err != nil {
				return err
			}
			return output.List(s.Printer, View, answer.GetTokens(), "", output.With("pos", answer.GetPos()))
		}),
	}
	cmd.Flags().StringVar(&node, "node", "", "all tokens of this node")
	_ = cmd.RegisterFlagCompletionFunc("node", p.CompleteNodes)
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// leastPart is the least number of characters of a part of an id.
const leastPart = 6

// tokenID returns the id of the token that ref stands for: an id, or what one token's id alone begins or ends with.
func tokenID(ctx context.Context, s *kit.Session, ref string) (string, error) {
	if ids.Valid(ref) {
		return ref, nil
	}
	var found []string
	if part := strings.ToLower(ref); len(part) >= leastPart {
		items, _, err := kit.Pages(ctx, 0, "", kit.Method(s.Client.Tokens.ListTokens, &readmodelv1.ListTokensRequest{}))
		if err != nil {
			return "", err
		}
		for _, token := range items {
			if id := token.GetTokenId(); strings.HasPrefix(id, part) || strings.HasSuffix(id, part) {
				found = append(found, id)
			}
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", fault.New(commonv1.Reason_REASON_NOT_FOUND, "there is no recovery token "+fault.Named(ref), fault.Remedy(
			"`gpuaas tokens list` shows the tokens; name all tokens of a node with --node NODE"))
	}
	return "", fault.New(commonv1.Reason_REASON_AMBIGUOUS, fault.Named(ref)+" stands for more than one token",
		fault.Unmet(found[:min(len(found), mostAmbiguous)]...))
}

// mostAmbiguous is how many ids the refusal of an ambiguous part of an id has at most.
const mostAmbiguous = 10

func extendCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.ExtendTokensRequest{}
	var until string
	cmd := &cobra.Command{
		Use: "extend --profile P --until T --reason TEXT", Short: "Accept the recovery tokens of a profile until a time",
		Long: "Accept the recovery tokens of a profile until a time, however old they are: for a planned outage of nodes\n" +
			"that is longer than node.recovery_token_max_age_seconds. The newest extension of a profile counts, so that a\n" +
			"shorter one ends a longer. It is audited, and changes no token. Needs the role operator.",
		Example: "  gpuaas tokens extend --profile default --until 2026-12-01T06:00:00Z --reason 'the site is moved'",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			if req.GetProfile() == "" || until == "" {
				return exit.Usage(errors.New("gpuaas tokens extend needs --profile P and --until T"))
			}
			at, err := parseTime(until, time.Now())
			if err != nil {
				return exit.Usage(err)
			}
			req.Until = timestamppb.New(at)
			answer, err := s.Client.Tokens.ExtendTokens(ctx, req)
			if err != nil {
				return err
			}
			if err := output.One(s.Printer, ExtensionView, answer.GetExtension()); err != nil {
				return err
			}
			human.Note(s.Err, "tokens of %s that would end earlier are good until %s; `gpuaas tokens list` shows each",
				req.GetProfile(), at.UTC().Format(time.RFC3339))
			return nil
		}),
	}
	cmd.Flags().StringVar(&req.Profile, "profile", "", "`profile` of the tokens (required)")
	cmd.Flags().StringVar(&until, "until", "",
		"`time` as 2026-12-01T06:00:00Z, or from now as 36h; at most 30 days ahead (required)")
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// parseTime reads a time, or a duration from now.
func parseTime(text string, now time.Time) (time.Time, error) {
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	ahead, err := time.ParseDuration(text)
	if err != nil {
		return time.Time{}, fmt.Errorf(
			"--until: %q is neither a time such as 2026-12-01T06:00:00Z nor a duration such as 36h", text)
	}
	return now.Add(ahead), nil
}
