package controlplane

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// TrustView is how the state of the preflight is printed, with the authority.
var TrustView = output.View[*recoveryv1.GetTrustResponse]{
	Name: func(t *recoveryv1.GetTrustResponse) string { return names.Of(t.GetPreflight().GetState()) },
	Columns: []output.Column[*recoveryv1.GetTrustResponse]{
		{Title: "STATE", Path: "preflight.state"},
		{Title: "SINCE", Path: "preflight.since"},
		{Title: "FAILING SIDE", Of: func(_ *output.Printer, t *recoveryv1.GetTrustResponse) string {
			return names.OfSet(t.GetPreflight().GetFailingSide())
		}},
		{Title: "SUMMARY", Path: "preflight.summary"},
		{Title: "NEXT ACTION", Path: "preflight.next_action"},
		{Title: "INCIDENT", Path: "preflight.incident_id"},
		{Title: "ISSUER", Path: "authority.issuer_name"},
		{Title: "ISSUER FINGERPRINT", Path: "authority.issuer_fingerprint"},
		{Title: "ISSUER ENDS", Path: "authority.issuer_not_after"},
		{Title: "ROOTS", Of: func(_ *output.Printer, t *recoveryv1.GetTrustResponse) string {
			return strings.Join(t.GetAuthority().GetRootFingerprints(), ", ")
		}},
		{Title: "AUTHORITY", Path: "authority.problem"},
		{Title: "LAST CHECK", Path: "last_check_at"},
		{Title: "ROTATION", Path: "rotation.phase"},
		{Title: "ROTATION SINCE", Path: "rotation.since"},
		{Title: "ROTATION WAITS FOR", Path: "rotation.waits_for"},
		{Title: "FORMER ISSUER", Path: "rotation.former_fingerprint"},
		{Title: "NEXT ISSUER", Path: "rotation.next_fingerprint"},
	},
}

// IngressColumns are the columns of the addresses of the ingress.
var IngressColumns = []output.Column[*recoveryv1.IngressTrust]{
	{Title: "REPLICA", Of: func(_ *output.Printer, t *recoveryv1.IngressTrust) string {
		if t.GetReplicaId() == "" {
			return "as agents are told"
		}
		return t.GetReplicaId()
	}},
	{Title: "ADDRESS", Path: "address"},
	{Title: "TRUSTS", Drop: 2, Of: func(_ *output.Printer, t *recoveryv1.IngressTrust) string {
		short := make([]string, 0, len(t.GetClientCaFingerprints()))
		for _, fingerprint := range t.GetClientCaFingerprints() {
			short = append(short, fingerprint[:min(16, len(fingerprint))])
		}
		return strings.Join(short, ", ")
	}},
	{Title: "ISSUER LISTED", Of: func(_ *output.Printer, t *recoveryv1.IngressTrust) string {
		switch {
		case len(t.GetClientCaFingerprints()) == 0:
			return ""
		case t.GetIssuerTrusted():
			return "yes"
		}
		return "no"
	}},
	{Title: "HANDSHAKE", Of: func(_ *output.Printer, t *recoveryv1.IngressTrust) string {
		return names.OfSet(t.GetHandshake())
	}},
	{Title: "DETAIL", Text: true, Path: "detail"},
}

// CheckView is how one check of the preflight is printed.
var CheckView = output.View[*recoveryv1.RunPreflightResponse]{
	Name: func(c *recoveryv1.RunPreflightResponse) string { return names.Of(c.GetResult()) },
	Columns: []output.Column[*recoveryv1.RunPreflightResponse]{
		{Title: "RESULT", Path: "result"},
		{Title: "ISSUER FINGERPRINT", Path: "authority.issuer_fingerprint"},
		{Title: "AUTHORITY", Path: "authority.problem"},
		{Title: "STATE", Path: "preflight.state"},
		{Title: "SINCE", Path: "preflight.since"},
	},
}

// CACommand returns the commands about the certificate authority of nodes.
func CACommand(p *kit.Program) *cobra.Command {
	return kit.Group("ca", "The certificate authority of nodes, and whether the ingress trusts it", nil, caStatus(p),
		caPreflight(p), caRotate(p), caRepair(p))
}

func caStatus(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Aliases: []string{"get"},
		Short: "Show what the authority signs with, what each replica of the ingress trusts, and whether they agree",
		Long: "Show the certificate that the authority signs with, the issuers that each replica of nodeapi trusts, and " +
			"the state of the preflight:\n" +
			"every 15 s recovery connects to the ingress with a canary certificate of the authority. While the state is " +
			"mismatch no certificate is\n" +
			"issued or renewed, and agents wait; sessions go on. FAILING SIDE is the side that has changed since both were " +
			"seen to agree.\n" +
			"The last rotation of the authority is shown with what it waits for, and the roots that replicas are sent beside " +
			"those of their files.",
		Example: "  gpuaas ca status\n  gpuaas ca status -o json --jq .preflight.state", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Trust.GetTrust(ctx, &readmodelv1.GetTrustRequest{})
			if err != nil {
				return err
			}
			trust := answer.GetTrust()
			err = output.One(s.Printer, TrustView, trust)
			err = output.Under(s.Printer, err, IngressColumns, trust.GetIngress())
			return output.Under(s.Printer, err, IssuerColumns, trust.GetIssuers())
		}),
	}
}

func caPreflight(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "preflight", Short: "Make one check of the ingress with a canary certificate now, and print each handshake",
		Long: "Make one check now: the authority signs a canary certificate, and recovery connects with it to the address " +
			"that agents are told and\n" +
			"to each replica of nodeapi. The command changes no state: RESULT is of this check alone, STATE follows from the " +
			"periodic checks.\n" +
			"Needs the role operator.",
		Example: "  gpuaas ca preflight\n  gpuaas ca preflight -o json --jq '.ingress[] | {address, handshake, detail}'",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Trust.RunPreflight(ctx, &readmodelv1.RunPreflightRequest{})
			if err != nil {
				return err
			}
			check := answer.GetCheck()
			err = output.One(s.Printer, CheckView, check)
			err = output.Under(s.Printer, err, IngressColumns, check.GetIngress())
			if err == nil && check.GetResult() != recoveryv1.PreflightState_PREFLIGHT_STATE_OK {
				human.Note(s.Err, "`gpuaas ca status` shows which side has changed, and what to do")
			}
			return err
		}),
	}
}
