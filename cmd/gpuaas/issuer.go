package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/mesh/material"
)

// newIssuerCommand returns the commands for the files of services' certificates that dev, cluster or compose has made.
func newIssuerCommand(program *kit.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "issuer", Short: "The issuer of services' certificates, where dev, cluster or compose has made it",
		GroupID: groupServices,
		Long: "The issuer of services' certificates of a mesh that dev, cluster or compose has prepared: no service has " +
			"its key, it stands in the\n" +
			"directory of the mesh. A rotation goes: `gpuaas keys rotate services`, then next, then renew once `gpuaas keys " +
			"list` shows the next\n" +
			"issuer as signing, then forget once it shows the one before as retired (docs/keys.md). Services take the files " +
			"within seconds;\n" +
			"nothing is restarted. Where another authority issues the certificates of services, it does these steps.",
	}
	var dir string
	cmd.PersistentFlags().StringVar(&dir, "dir", "",
		"the --data-dir of dev or cluster, or the --dir of `gpuaas compose prepare`")
	_ = cmd.MarkPersistentFlagRequired("dir")
	step := func(use, short, long string, do func(cmd *cobra.Command, m *material.Material) error) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Long: long, Args: noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				m, err := openMaterial(dir)
				if err != nil {
					return err
				}
				if err := do(cmd, m); err != nil {
					return err
				}
				issuers, err := m.Issuers()
				if err != nil {
					return err
				}
				return kit.Records(program, cmd, func(i listedIssuer) string { return i.KeyID }, issuerColumns,
					listIssuers(issuers))
			},
		}
	}
	return needs(cmd, "list, next, renew or forget",
		step("list", "List the issuers that services are given, with the services whose certificates they issued", "",
			func(*cobra.Command, *material.Material) error { return nil }),
		step("next", "Make the next issuer, and give it to services and new machines with its cross certificate",
			"next makes the next issuer and a cross certificate of the present one for it, and adds both to what services, "+
				"and machines that enrol,\n"+
				"trust. Certificates stay as they are: renew replaces them.",
			func(_ *cobra.Command, m *material.Material) error {
				return refusedWith(m.NextIssuer(), material.ErrUnused,
					"replace the certificates with `gpuaas issuer renew` before another issuer is made")
			}),
		step("renew", "Replace certificates of services that an earlier issuer has issued, or that are near their end",
			"renew replaces certificates of services. A service shows the new one once each live replica trusts its issuer, "+
				"and reports it until\n"+
				"then. `gpuaas dev` does the same each hour.",
			func(cmd *cobra.Command, m *material.Material) error {
				renewed, err := m.Renew()
				if err == nil && !renewed {
					_, err = fmt.Fprintln(cmd.ErrOrStderr(),
						"each certificate is of the newest issuer and has time left: nothing was changed")
				}
				return err
			}),
		newIssuerForget(step),
	)
}

func newIssuerForget(
	step func(use, short, long string, do func(*cobra.Command, *material.Material) error) *cobra.Command,
) *cobra.Command {
	var yes bool
	cmd := step("forget", "Take earlier issuers off what services and new machines trust",
		"forget takes the issuers before the newest off what services, and machines that enrol, trust. It is refused "+
			"while a certificate of\n"+
			"one stands in the files. Wait until `gpuaas keys list` shows them as retired: a replica that still shows a "+
			"certificate of one is cut\n"+
			"off at once. Do not wait where others know the key of an issuer.",
		func(cmd *cobra.Command, m *material.Material) error {
			issuers, err := m.Issuers()
			if err != nil {
				return err
			}
			var earlier []string
			for _, i := range issuers {
				if !i.Newest {
					earlier = append(earlier, i.ID)
				}
			}
			if len(earlier) == 0 {
				_, err := fmt.Fprintln(cmd.ErrOrStderr(), "there is no earlier issuer: nothing was changed")
				return err
			}
			err = kit.Confirm(cmd, yes, earlier[len(earlier)-1],
				"Services will no longer trust the issuers "+strings.Join(earlier, ", ")+" by their files.",
				"A replica that still shows a certificate of one is cut off: `gpuaas keys list` shows what is needed.")
			if err != nil {
				return err
			}
			return refusedWith(m.ForgetIssuers(), material.ErrInUse, "replace it with `gpuaas issuer renew`")
		})
	cmd.Flags().BoolVar(&yes, "yes", false, "go ahead without asking; needed where there is no terminal to ask on")
	return cmd
}

// refusedWith returns a refusal with a remedy for an error that wraps what, and any other error unchanged.
func refusedWith(err, what error, remedy string) error {
	if !errors.Is(err, what) {
		return err
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, err.Error(), fault.Remedy(remedy), fault.Cause(err))
}

// openMaterial opens the material in the directory of a mesh, or in the data directory below it.
func openMaterial(dir string) (*material.Material, error) {
	if dir == "" {
		return nil, exit.Usage(errors.New("--dir is empty"))
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, exit.Usage(err)
	}
	switch _, err := os.Stat(filepath.Join(dir, "material")); {
	case err == nil:
		dir = filepath.Join(dir, "material")
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	m, err := material.Open(dir)
	if errors.Is(err, material.ErrNone) {
		return nil, exit.Usage(err)
	}
	return m, err
}

// listedIssuer is a line of the list of issuers.
type listedIssuer struct {
	KeyID    string   `json:"key_id"` // as in `gpuaas keys list`
	Issues   bool     `json:"issues"`
	NotAfter string   `json:"not_after"`
	Services []string `json:"services"` // whose certificates it has issued
}

func listIssuers(issuers []material.Issuer) []listedIssuer {
	var out []listedIssuer
	for _, i := range issuers {
		out = append(out, listedIssuer{
			i.ID, i.Newest, i.NotAfter.UTC().Format(time.RFC3339),
			append([]string{}, i.Services...),
		})
	}
	return out
}

var issuerColumns = []kit.Column[listedIssuer]{
	{Title: "KEY ID", Value: func(i listedIssuer) string { return i.KeyID }},
	{Title: "ISSUES", Value: func(i listedIssuer) string { return human.YesNo(i.Issues) }},
	{Title: "NOT AFTER", Drop: 1, Value: func(i listedIssuer) string { return i.NotAfter }},
	{Title: "CERTIFICATES OF", Text: true, Value: func(i listedIssuer) string { return strings.Join(i.Services, " ") }},
}
