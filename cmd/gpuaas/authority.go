package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// newAuthorityCommand returns the commands for the directory of the node authority.
func newAuthorityCommand() *cobra.Command {
	return needs(&cobra.Command{
		Use: "authority", Short: "The directory of the node authority: have a step-ca process sign in its place",
		GroupID: groupServices,
	}, "export", newAuthorityExportCommand())
}

func newAuthorityExportCommand() *cobra.Command {
	var cfg ca.ExportConfig
	var urlFile string
	cmd := &cobra.Command{
		Use: "export", Short: "Write the configuration and the issuer's key of a step-ca process that signs as ca_dir does",
		Args: noArgs,
		Long: "export writes ca.json, the root's certificate and the issuer with its key. `step-ca OUT/ca.json` then signs " +
			"with the same issuer,\n" +
			"for the same provisioner: no node and no ingress has to be changed. Recovery is told of it by the lines that " +
			"export prints, which\n" +
			"take the place of ca_dir in its configuration. The keys of the root and of the provisioner are not exported; " +
			"the provisioner's stays\n" +
			"with recovery. ca_dir itself is not changed. A process rotates its issuer by its own means: `gpuaas ca rotate` " +
			"is refused then.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if urlFile != "" {
				url, err := config.SecretFile(urlFile).Read()
				if err != nil {
					return exit.Usage(err)
				}
				cfg.DatabaseURL = url.Reveal()
			}
			for _, dir := range []*string{&cfg.Dir, &cfg.Out} {
				var err error
				if *dir, err = filepath.Abs(*dir); err != nil {
					return exit.Usage(err)
				}
			}
			files, err := ca.Export(cfg)
			if err != nil {
				return exportRefusal(err, cfg)
			}
			_, port, err := net.SplitHostPort(cfg.Address)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "exported to %s; start it with: step-ca %s\nin recovery's configuration, in place "+
				"of ca_dir:\n", cfg.Out, files.Config)
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "ca_process:\n  url: https://%s\n  roots_file: %s\n  key_file: %s\n",
				net.JoinHostPort(cfg.Names[0], port), files.Root, files.Provisioner)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "ca-dir", "", "directory of the node authority, ca_dir of recovery's configuration")
	f.StringVar(&cfg.Out, "out", "", "directory to make for the step-ca process")
	f.StringVar(&cfg.Address, "address", "", "host:port at which the process listens")
	f.StringSliceVar(&cfg.Names, "name", nil,
		"name or address by which recovery reaches the process; the first one is used")
	f.StringVar(&cfg.Issuer, "issuer", "",
		"`fingerprint` of the issuer that signs, as gpuaas ca status shows it; needed after a rotation")
	f.StringVar(&urlFile, "database-url-file", "",
		"file with the connection string of a Postgres database for the process; without one it forgets used tokens and "+
			"signed certificates when it ends")
	for _, name := range []string{"ca-dir", "out", "address", "name"} {
		_ = cmd.MarkFlagRequired(name)
	}
	return cmd
}

// exportRefusal returns a refusal for an export that cannot be made as it was asked for.
func exportRefusal(err error, cfg ca.ExportConfig) error {
	remedy := "correct what is named, and run it again: nothing was written"
	switch {
	case errors.Is(err, fs.ErrExist):
		remedy = "name a directory for --out that does not exist, or remove " + cfg.Out
	case errors.Is(err, ca.ErrManyIssuers):
		remedy = "run it again with --issuer FINGERPRINT"
	}
	if f, ok := fault.As(err); ok {
		return f
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, err.Error(), fault.Remedy(remedy), fault.Cause(err))
}
