package profiles

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// mostBundle is the largest file of trust that is sent, in bytes.
const mostBundle = 256 << 10

// View is how versions of profiles are printed.
var View = output.View[*recoveryv1.ProfileVersion]{
	Name: func(v *recoveryv1.ProfileVersion) string {
		return v.GetProfile().GetName() + " " + strconv.FormatInt(v.GetProfile().GetVersion(), 10)
	},
	Columns: []output.Column[*recoveryv1.ProfileVersion]{
		{Title: "NAME", Of: func(_ *output.Printer, v *recoveryv1.ProfileVersion) string {
			if v.GetDefaultName() {
				return v.GetProfile().GetName() + " (default)"
			}
			return v.GetProfile().GetName()
		}},
		{Title: "VERSION", Path: "profile.version"},
		{Title: "PHASE", Path: "phase"},
		{Title: "SINCE", Drop: 2, Path: "since"},
		{Title: "NODES", Path: "nodes"},
		{Title: "API", Path: "profile.api_url"},
		{Title: "RECOVERY", Drop: 1, Path: "profile.recovery_url"},
		{Title: "TERMINAL", Path: "profile.terminal_url", Wide: true},
		{Title: "FINGERPRINT", Path: "profile.fingerprint", Wide: true},
		{Title: "BY", Path: "by", Wide: true},
		{Title: "REASON", Text: true, Path: "reason", Wide: true},
	},
}

// Command returns the commands about profiles.
func Command(p *kit.Program) *cobra.Command {
	return kit.Group("profiles", "Profiles of nodes: where they reach the control plane, and what they trust",
		[]string{"profile"}, listCommand(p), showCommand(p), setCommand(p), activateCommand(p), retireCommand(p))
}

func listCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListProfilesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List the versions of profiles with their phases, and how many nodes report each",
		Long: "List the versions of profiles, the newest of each name first. An announced version is offered to connected\n" +
			"nodes of the profile; the active one is given to nodes as they enrol; a retiring one is not given any more, and\n" +
			"nodes that have it are well; a node that reports a retired one, or one that is not known, has the reason\n" +
			"endpoint_profile_drift. NODES counts the nodes whose newest session reported the version: it is their word.\n" +
			"Trust bundles are left out: `gpuaas profiles show NAME VERSION` has them. Below the table stands why the\n" +
			"profile of recovery's configuration is not taken, if it is not; as JSON, `gpuaas status` has that.",
		Example: "  gpuaas profiles list\n  gpuaas profiles list -o json --jq '.items[] | select(.phase == \"active\")'",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			if page.Watch {
				return kit.Show(ctx, s, page, kit.Source[*recoveryv1.ProfileVersion]{View: View, Fetch: kit.Whole(
					func(ctx context.Context) ([]*recoveryv1.ProfileVersion, error) {
						answer, err := s.Client.Profiles.ListProfiles(ctx, req)
						return answer.GetItems(), err
					})})
			}
			answer, err := s.Client.Profiles.ListProfiles(ctx, req)
			if err != nil {
				return err
			}
			if err := output.List(s.Printer, View, answer.GetItems(), ""); err != nil || s.Structured() ||
				s.Format == output.FormatName {
				return err
			}
			return notTaken(ctx, s)
		}),
	}
	page.WatchFlag(cmd)
	cmd.Flags().StringVar(&req.Name, "name", "", "only the versions of this profile")
	return cmd
}

// configured is the part of `gpuaas status` that has whether recovery has taken the profile of its configuration.
const configured = "configured_profile"

// notTaken prints why the profile of recovery's configuration is not taken, if it is not.
func notTaken(ctx context.Context, s *kit.Session) error {
	status, err := s.Query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	i := slices.IndexFunc(status.GetComponents(), func(c *readmodelv1.ComponentStatus) bool {
		return c.GetName() == configured && c.GetState() == commonv1.PartState_PART_STATE_DOWN
	})
	if i < 0 {
		return nil
	}
	if err := s.Section("NAME", "VALUE"); err != nil {
		return err
	}
	part := status.GetComponents()[i]
	return s.Pairs([][2]string{
		{"NOT TAKEN", part.GetDetail()}, {"REASON", part.GetReason()}, {"NEXT ACTION", part.GetNextAction()},
	})
}

func showCommand(p *kit.Program) *cobra.Command {
	var bundle, recoveryBundle bool
	cmd := &cobra.Command{
		Use: "show NAME VERSION", Short: "Show one version of a profile, or a trust bundle of it",
		Long: "Show one version of a profile. --bundle and --recovery-bundle print what nodes trust, PEM, and nothing\n" +
			"else. The control plane gives the bundles of the active version of a profile and of its newest ones that\n" +
			"are not retired, up to 4 MiB in all.",
		Example: "  gpuaas profiles show default 4 --bundle > roots.pem",
		Args:    kit.Args("NAME", "VERSION"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			number, err := versionOf(args[1])
			if err != nil {
				return err
			}
			answer, err := s.Client.Profiles.ListProfiles(ctx, &readmodelv1.ListProfilesRequest{Name: args[0]})
			if err != nil {
				return err
			}
			for _, v := range answer.GetItems() {
				if v.GetProfile().GetVersion() != number {
					continue
				}
				switch {
				case bundle:
					return writeBundle(s, v.GetProfile().GetCaBundlePem())
				case recoveryBundle:
					return writeBundle(s, v.GetProfile().GetRecoveryCaBundlePem())
				}
				return output.One(s.Printer, View, v)
			}
			return fault.New(commonv1.Reason_REASON_PROFILE_UNKNOWN,
				fmt.Sprintf("there is no version %d of a profile %s", number, args[0]),
				fault.Remedy("`gpuaas profiles list` has the numbers"))
		}),
	}
	cmd.Flags().BoolVar(&bundle, "bundle", false, "print the trust for the node API alone")
	cmd.Flags().BoolVar(&recoveryBundle, "recovery-bundle", false, "print the trust for enrolment alone")
	cmd.MarkFlagsMutuallyExclusive("bundle", "recovery-bundle")
	return cmd
}

func writeBundle(s *kit.Session, pem []byte) error {
	if len(pem) == 0 {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the control plane gives no bundle of this version",
			fault.Unmet("the version is not retired, and is the active one or among the newest"))
	}
	_, err := s.Out.Write(pem)
	return err
}

func setCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.SetProfileRequest{}
	var trust, recoveryTrust string
	cmd := &cobra.Command{
		Use:   "set NAME --api A --recovery URL --ca-bundle FILE --reason TEXT",
		Short: "Announce endpoints and trust of a profile as its next version",
		Long: "Announce endpoints and trust of a profile. Recovery connects to each endpoint first: the version is\n" +
			"announced if all prove to be what they are to be under the trust that comes with them, else nothing\n" +
			"changes. Connected nodes of the profile are then offered it, and verify it from where they are; until it is\n" +
			"activated, nodes enrol with the version before. A version that was announced before it is retiring then.\n" +
			"Needs the role operator.",
		Example: "  gpuaas profiles set default --api agents.example.org:8443 --recovery https://enroll.example.org " +
			"--ca-bundle services.pem --reason 'the site is moved'",
		Args: kit.Args("NAME"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Name = args[0]
			if req.GetApiUrl() == "" || req.GetRecoveryUrl() == "" || trust == "" {
				return exit.Usage(errors.New("gpuaas profiles set needs --api A, --recovery URL and --ca-bundle FILE"))
			}
			var err error
			if req.CaBundlePem, err = readBundle("--ca-bundle", trust); err != nil {
				return err
			}
			if recoveryTrust != "" {
				if req.RecoveryCaBundlePem, err = readBundle("--recovery-ca-bundle", recoveryTrust); err != nil {
					return err
				}
			}
			answer, err := s.Client.Profiles.SetProfile(ctx, req)
			if err != nil {
				return err
			}
			version := answer.GetProfile().GetProfile().GetVersion()
			if err := output.One(s.Printer, View, answer.GetProfile(), output.With("pos", answer.GetPos())); err != nil {
				return err
			}
			if answer.GetProfile().GetPhase() == recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED {
				human.Note(s.Err, "nodes are offered it now; `gpuaas profiles list` shows how many report it. Give it to nodes as "+
					"they enrol with:\n  gpuaas profiles activate %s %d --reason TEXT", req.GetName(), version)
			}
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&req.ApiUrl, "api", "", "`address` of the node API, as host:port (required)")
	flags.StringVar(&req.RecoveryUrl, "recovery", "", "https `URL` of the enrolment listener (required)")
	flags.StringVar(&req.TerminalUrl, "terminal", "", "`address` of the terminal endpoint; none without it")
	flags.StringVar(&trust, "ca-bundle", "", "`file` of the certificate authorities that nodes trust, PEM (required)")
	flags.StringVar(&recoveryTrust, "recovery-ca-bundle", "",
		"`file` of those that they trust at the enrolment listener; the same without it")
	flags.Int64Var(&req.NewestSeen, "newest-seen", 0,
		"the newest `version` that you saw: with another one meanwhile nothing changes")
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

func activateCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.ActivateProfileRequest{}
	cmd := &cobra.Command{
		Use: "activate NAME VERSION --reason TEXT", Short: "Give a version of a profile to nodes as they enrol",
		Long: "Make a version that is announced or retiring the active one of its profile: nodes get it as they enrol.\n" +
			"Recovery connects to its endpoints first, as `profiles set` does: if one does not prove to be what it is to\n" +
			"be, nothing changes.\n" +
			"The one that was active is retiring then, and nodes that have it are well. To go back, activate the former\n" +
			"one again: it gets a number above the others, so that nodes take it. Needs the role operator.",
		Example: "  gpuaas profiles activate default 4 --reason 'all nodes have it'",
		Args:    kit.Args("NAME", "VERSION"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			var err error
			req.Name = args[0]
			if req.Version, err = versionOf(args[1]); err != nil {
				return err
			}
			answer, err := s.Client.Profiles.ActivateProfile(ctx, req)
			if err != nil {
				return err
			}
			return output.One(s.Printer, View, answer.GetProfile(), output.With("pos", answer.GetPos()))
		}),
	}
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

func retireCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.RetireProfileRequest{}
	cmd := &cobra.Command{
		Use: "retire NAME VERSION --reason TEXT", Short: "End a version of a profile that is not active",
		Long: "End a version of a profile: nodes that report it have drifted from then on. It is refused while nodes\n" +
			"report it, unless it is forced, as when its endpoints must not be used any more. The active version is never\n" +
			"retired: activate another one first. `profiles set` with the same content announces it again. Needs the role\n" +
			"operator.",
		Example: "  gpuaas profiles retire default 3 --reason 'the old site is closed'",
		Args:    kit.Args("NAME", "VERSION"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			var err error
			req.Name = args[0]
			if req.Version, err = versionOf(args[1]); err != nil {
				return err
			}
			answer, err := s.Client.Profiles.RetireProfile(ctx, req)
			if err != nil {
				return err
			}
			return output.One(s.Printer, View, answer.GetProfile(), output.With("pos", answer.GetPos()))
		}),
	}
	cmd.Flags().BoolVar(&req.Force, "force", false, "even while nodes report it")
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

func versionOf(text string) (int64, error) {
	version, err := strconv.ParseInt(text, 10, 64)
	if err != nil || version <= 0 {
		return 0, exit.Usage(fmt.Errorf("VERSION: %q is no version, such as 4 (`gpuaas profiles list`)", text))
	}
	return version, nil
}

func readBundle(flag, file string) ([]byte, error) {
	info, err := os.Stat(file)
	if err == nil && info.Size() > mostBundle {
		err = fmt.Errorf("%s is larger than %d KiB", file, mostBundle>>10)
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, exit.Usage(fmt.Errorf("%s: %w", flag, err))
	}
	return text, nil
}
