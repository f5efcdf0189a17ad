package controlplane

import (
	"cmp"
	"context"
	"errors"

	"github.com/spf13/cobra"

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

// AuthorityRotationView is how a rotation of the node authority is printed.
var AuthorityRotationView = output.View[*recoveryv1.AuthorityRotation]{
	Name: (*recoveryv1.AuthorityRotation).GetRotationId,
	Columns: []output.Column[*recoveryv1.AuthorityRotation]{
		{Title: "ROTATION", Path: "rotation_id"},
		{Title: "PHASE", Path: "phase"},
		{Title: "SINCE", Path: "since"},
		{Title: "WAITS FOR", Path: "waits_for"},
		{Title: "WITH ROOT", Path: "with_root"},
		{Title: "FORMER ISSUER", Path: "former_fingerprint"},
		{Title: "NEXT ISSUER", Path: "next_fingerprint"},
		{Title: "BY", Path: "by"},
		{Title: "REASON", Path: "reason"},
	},
}

// IssuerColumns are the columns of the roots that replicas of nodeapi are sent.
var IssuerColumns = []output.Column[*recoveryv1.TrustedIssuer]{
	{Title: "SENT ROOT", Path: "name"},
	{Title: "FINGERPRINT", Path: "fingerprint"},
	{Title: "ENDS", Path: "not_after"},
	{Title: "FROM", Path: "origin"},
	{Title: "SINCE", Path: "since"},
	{Title: "BY", Path: "by"},
	{Title: "REASON", Text: true, Path: "reason"},
}

// IssuersView is how the roots that replicas of nodeapi are sent are printed alone.
var IssuersView = output.View[*recoveryv1.TrustedIssuer]{
	Name: (*recoveryv1.TrustedIssuer).GetFingerprint, Columns: IssuerColumns,
}

func caRotate(p *kit.Program) *cobra.Command {
	req := &readmodelv1.RotateAuthorityRequest{}
	var retire bool
	cmd := &cobra.Command{
		Use: "rotate", Short: "Exchange what the authority signs nodes' certificates with, in phases",
		Long: "Begin a rotation of the certificate that the authority signs with, and of its root with --with-root. " +
			"Nothing is restarted.\n" +
			"announced: the next issuer is made, and replicas of nodeapi are sent its root. It signs once each replica has " +
			"accepted a certificate\n" +
			"of it; until then the former one goes on. both_valid: the next issuer signs, and nodes get certificates of it " +
			"as they renew.\n" +
			"done: no certificate of the former issuer counts any more, at the latest when the last one has ended. " +
			"`gpuaas ca status` shows the phase\n" +
			"and what it waits for. --cancel gives up a rotation that is announced. --retire revokes the certificates of " +
			"the former issuer at once:\n" +
			"sessions on them are closed, and their nodes recover with their tokens. One rotation goes on at a time. Needs " +
			"the role security.",
		Example: "  gpuaas ca rotate --reason 'yearly' --dry-run\n" +
			"  gpuaas ca rotate --with-root --reason 'its key was copied'\n" +
			"  gpuaas ca rotate --retire --reason 'its key was copied'",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			if retire {
				if req.GetCancel() || req.GetWithRoot() || req.GetDryRun() {
					return exit.Usage(errors.New("--retire ends the rotation that is open: it goes with --reason alone"))
				}
				return retireFormer(ctx, s, req.GetReason())
			}
			req.IdempotencyKey = cmp.Or(req.GetIdempotencyKey(), ids.New())
			answer, err := s.Client.Authority.RotateAuthority(ctx, req)
			if err != nil {
				return err
			}
			if req.GetDryRun() {
				human.Note(s.Err, "nothing was changed: it can be asked for")
				if !s.Structured() {
					return nil
				}
			}
			rotation := cmp.Or(answer.GetRotation(), &recoveryv1.AuthorityRotation{}) // none after a dry run
			return output.One(s.Printer, AuthorityRotationView, rotation)
		}),
	}
	flags := cmd.Flags()
	flags.BoolVar(&req.WithRoot, "with-root", false, "exchange the root too, not the issuing certificate alone")
	flags.BoolVar(&req.Cancel, "cancel", false, "give up the rotation that is announced, instead")
	flags.BoolVar(&retire, "retire", false, "revoke the certificates of the former issuer at once, instead")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only check whether it can be asked for")
	flags.StringVar(&req.IdempotencyKey, "idempotency-key", "",
		"a repeated request with the same `key` gets the same rotation")
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// retireFormer ends the open rotation by force.
func retireFormer(ctx context.Context, s *kit.Session, reason string) error {
	answer, err := s.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
	if err != nil {
		return err
	}
	rotation := answer.GetTrust().GetRotation()
	if rotation.GetPhase() != recoveryv1.RotationPhase_ROTATION_PHASE_BOTH_VALID {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "no rotation has a former issuer to retire",
			fault.Remedy("`gpuaas ca status` shows the phase of the rotation: the next issuer signs first (both_valid)"))
	}
	if _, err := s.Client.Authority.RepairTrust(ctx, &readmodelv1.RepairTrustRequest{
		RootFingerprint: rotation.GetFormerFingerprint(), Reason: reason, Withdraw: true,
	}); err != nil {
		return err
	}
	human.Note(s.Err, "certificates of %s are being revoked: `gpuaas ca status` shows when the rotation is done",
		rotation.GetFormerFingerprint())
	if rotation.GetWithRoot() {
		human.Note(s.Err, "take its root out of node_ca_file of each replica of nodeapi, if it is there")
	}
	return nil
}

func caRepair(p *kit.Program) *cobra.Command {
	req := &readmodelv1.RepairTrustRequest{}
	cmd := &cobra.Command{
		Use: "repair", Short: "Have the ingress trust the root that the authority signs under now",
		Long: "Send the root that the authority signs under to each replica of nodeapi, which trusts it within seconds " +
			"beside those of its file.\n" +
			"It ends a mismatch on either side: an ingress that lost the root, and an authority that came back with other " +
			"signing material.\n" +
			"Compare the fingerprint with the authority's own record first: one that it does not sign under is refused. The " +
			"preflight then proves the\n" +
			"repair by handshakes, issuance goes on, and nodes that were refused connect again by themselves. --withdraw " +
			"ends the sending of a root\n" +
			"under which the authority does not sign, or which the files of the ingress have by now. With the fingerprint\n" +
			"of an issuer of which no copy is left it has the authority sign with its first issuer again. Needs the role " +
			"security.",
		Example: "  gpuaas ca repair --root FINGERPRINT --reason 'the bundle of the ingress was swapped'\n" +
			"  gpuaas ca repair --root FINGERPRINT --withdraw --reason 'the former material is back'",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Authority.RepairTrust(ctx, req)
			if err != nil {
				return err
			}
			if err := output.List(s.Printer, IssuersView, answer.GetIssuers(), ""); err != nil {
				return err
			}
			human.Note(s.Err, "`gpuaas ca status` shows when the preflight has proven it")
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&req.RootFingerprint, "root", "", "`fingerprint` of the root, as `gpuaas ca status` shows it")
	flags.BoolVar(&req.Withdraw, "withdraw", false, "the ingress is not sent this root any more, instead")
	_ = cmd.MarkFlagRequired("root") // the flag is there
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}
