package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/mesh/compose"
	"github.com/gpuaas/mesh/mesh/person"
)

// newComposeCommand returns the commands that the containers of docker-compose.yaml run once.
func newComposeCommand() *cobra.Command {
	return needs(&cobra.Command{
		Use: "compose", Short: "Prepare the state that the containers of docker-compose.yaml need", GroupID: groupServices,
	}, "prepare or admit", newComposePrepareCommand(), newComposeAdmitCommand())
}

func newComposePrepareCommand() *cobra.Command {
	cfg := compose.Config{}
	var owner string
	cmd := &cobra.Command{
		Use: "prepare", Short: "Make authorities, certificates, keys and passwords; what exists is kept", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if cfg.UID, cfg.GID, err = parseOwner(owner); err != nil {
				return exit.Usage(err)
			}
			if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
				return exit.Usage(err)
			}
			if _, err := compose.Prepare(cfg); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "prepared %s\n", cfg.Dir)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Dir, "dir", "", "directory of the containers' state")
	f.StringVar(&cfg.TrustDomain, "trust-domain", "mesh.local", "trust domain of the mesh")
	f.StringSliceVar(&cfg.Hosts, "host", nil,
		"name or address, beside localhost, by which the published ports are reached")
	f.StringVar(&owner, "owner", "", "UID:GID that the services run as (default: the user who runs this)")
	_ = cmd.MarkFlagRequired("dir")
	return cmd
}

func newComposeAdmitCommand() *cobra.Command {
	var urlFile, tokenFile, subject string
	var life time.Duration
	cmd := &cobra.Command{
		Use: "admit", Short: "Give a person a session before any identity provider is configured", Args: noArgs,
		Long: "admit makes a session in the database of readmodel and puts its token into a file; a good one that is " +
			"there is kept.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			url, err := config.SecretFile(urlFile).Read()
			if err != nil {
				return exit.Usage(err)
			}
			_, err = person.Admit(cmd.Context(), url.Reveal(), tokenFile, person.Session{
				Subject: subject, Roles: []string{"operator", "security", "viewer"}, Life: life,
			})
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&urlFile, "database-url-file", "", "file with the connection string of the role readmodel")
	f.StringVar(&tokenFile, "token-file", "", "file for the token")
	f.StringVar(&subject, "subject", "operator", "who it is")
	f.DurationVar(&life, "life", 12*time.Hour, "how long the session lasts")
	_ = cmd.MarkFlagRequired("database-url-file")
	_ = cmd.MarkFlagRequired("token-file")
	return cmd
}

// parseOwner parses UID:GID. For the empty text it returns -1, -1, which leaves the owner as it is.
func parseOwner(text string) (int, int, error) {
	if text == "" {
		return -1, -1, nil
	}
	uid, gid, _ := strings.Cut(text, ":")
	u, uerr := strconv.ParseUint(uid, 10, 31)
	g, gerr := strconv.ParseUint(gid, 10, 31)
	if err := errors.Join(uerr, gerr); err != nil {
		return 0, 0, fmt.Errorf("--owner %q is not UID:GID", text)
	}
	return int(u), int(g), nil
}
