package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/mesh/material"
)

// newIssuerCommand holds what is done to the files of services' certificates where dev, cluster or compose has made them.
func newIssuerCommand(program *client.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "issuer", Short: "The issuer of services' certificates, where dev, cluster or compose has made it", GroupID: groupServices,
		Long: "The issuer of services' certificates of a mesh that dev, cluster or compose has prepared: no service has its key, it stands in the\n" +
			"directory of the mesh. A rotation goes: `gpuaas keys rotate services`, then next, then renew once `gpuaas keys list` shows the next\n" +
			"issuer as signing, then forget once it shows the one before as retired (docs/keys.md). Services take the files within seconds;\n" +
			"nothing is restarted. Where another authority issues the certificates of services, it does these steps.",
		Args: func(cmd *cobra.Command, _ []string) error {
			return client.Usage(fmt.Errorf("%s needs list, next, renew or forget", cmd.CommandPath()))
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	var dir string
	cmd.PersistentFlags().StringVar(&dir, "dir", "", "the --data-dir of dev or cluster, or the --dir of `gpuaas compose prepare`")
	_ = cmd.MarkPersistentFlagRequired("dir")
	step := func(use, short, long string, do func(m *material.Material, out io.Writer) error) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Long: long, Args: noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				m, err := openMaterial(dir)
				if err != nil {
					return err
				}
				if err := do(m, cmd.ErrOrStderr()); err != nil {
					return err
				}
				return tellIssuers(cmd.OutOrStdout(), m, program.JSON())
			},
		}
	}
	cmd.AddCommand(
		step("list", "List the issuers that services are given, with the services whose certificates they issued", "",
			func(*material.Material, io.Writer) error { return nil }),
		step("next", "Make the next issuer, and give it to services and new machines with its cross certificate",
			"next makes the next issuer and a cross certificate of the present one for it, and adds both to what services, and machines that enrol,\n"+
				"trust. Certificates stay as they are: renew replaces them.",
			func(m *material.Material, _ io.Writer) error {
				issuers, err := m.Issuers()
				if err != nil {
					return err
				}
				if newest := issuers[len(issuers)-1]; len(newest.Services) == 0 {
					return client.Usage(fmt.Errorf("the issuer %s has issued no certificate yet: renew them before another issuer is made", newest.ID))
				}
				return m.NextIssuer()
			}),
		step("renew", "Replace certificates of services that an earlier issuer has issued, or that are near their end",
			"renew replaces certificates of services. A service shows the new one once each live replica trusts its issuer, and reports it until then;\n"+
				"`gpuaas dev` and `gpuaas cluster up` do the same each hour.",
			func(m *material.Material, out io.Writer) error {
				renewed, err := m.Renew()
				if err == nil && !renewed {
					_, err = fmt.Fprintln(out, "each certificate is of the newest issuer and has time left: nothing was changed")
				}
				return err
			}),
		step("forget", "Take earlier issuers off what services and new machines trust",
			"forget takes the issuers before the newest off what services, and machines that enrol, trust. It is refused while a certificate of\n"+
				"one stands in the files. Wait until `gpuaas keys list` shows them as retired: before that, it cuts off at once a replica that has not\n"+
				"taken its new certificate, as is right only for an issuer whose key others know.",
			func(m *material.Material, _ io.Writer) error {
				err := m.ForgetIssuers()
				if errors.Is(err, material.ErrInUse) {
					return client.Usage(fmt.Errorf("%w: `gpuaas issuer renew` replaces it", err))
				}
				return err
			}),
	)
	return cmd
}

// openMaterial opens what stands in the directory of a mesh, wherever below it.
func openMaterial(dir string) (*material.Material, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, client.Usage(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "material")); err == nil {
		dir = filepath.Join(dir, "material")
	}
	m, err := material.Open(dir)
	if errors.Is(err, material.ErrNone) {
		return nil, client.Usage(err)
	}
	return m, err
}

func tellIssuers(out io.Writer, m *material.Material, structured bool) error {
	issuers, err := m.Issuers()
	if err != nil {
		return err
	}
	if structured {
		type row struct {
			KeyID    string   `json:"key_id"`
			Issues   bool     `json:"issues"`
			NotAfter string   `json:"not_after"`
			Services []string `json:"services"`
		}
		rows := []row{}
		for _, i := range issuers {
			rows = append(rows, row{i.ID, i.Newest, i.NotAfter.UTC().Format(time.RFC3339), append([]string{}, i.Services...)})
		}
		return json.NewEncoder(out).Encode(map[string]any{"issuers": rows})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KEY ID\tISSUES\tNOT AFTER\tCERTIFICATES OF")
	for _, i := range issuers {
		issues := "no"
		if i.Newest {
			issues = "yes"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", i.ID, issues, i.NotAfter.UTC().Format(time.DateOnly), strings.Join(i.Services, " "))
	}
	return w.Flush()
}
