package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/schema"
)

// migrateConfig is the file of `gpuaas migrate`.
type migrateConfig struct {
	// AdminURLFile is the file with the connection string of a superuser, or of a role with CREATEDB and CREATEROLE, as
	// which databases and roles are created.
	AdminURLFile config.SecretFile `yaml:"admin_url_file"`
	// RolePasswordsFile is a YAML map of role to password.
	RolePasswordsFile config.SecretFile `yaml:"role_passwords_file"`
	Database          string            `yaml:"database"`
	WorkloadDatabase  string            `yaml:"workload_database"`
	Exclusive         bool              `yaml:"exclusive"`
}

// Validate reports everything that is missing.
func (c migrateConfig) Validate() error {
	var errs []error
	if c.AdminURLFile == "" {
		errs = append(errs, errors.New("admin_url_file is needed"))
	}
	if c.RolePasswordsFile == "" {
		errs = append(errs, errors.New("role_passwords_file is needed"))
	}
	return errors.Join(errs...)
}

func newMigrateCommand() *cobra.Command {
	var file, ownerURL string
	cmd := &cobra.Command{
		Use: "migrate", Short: "Create databases, roles and schema, and show which migrations are applied",
		GroupID: groupServices,
		Long: "migrate up makes the databases and one role for each service, then brings the schema up to this version; " +
			"it may be run again at any time.\n" +
			"With --database-url-file it only brings the schema up, as the owner of the schema.\n" +
			"migrate status shows which migrations the database has, its era, and whether rollback mode is active.\n" +
			"migrate restored is run once after the database was restored from a backup, before any service is started:\n" +
			"see docs/restore.md.",
	}
	flags := cmd.PersistentFlags()
	flags.StringVar(&file, "config", "",
		"configuration file, YAML: admin_url_file, role_passwords_file, database, workload_database, exclusive")
	flags.StringVar(&ownerURL, "database-url-file", "", "file with the connection string of the schema's owner")
	cmd.MarkFlagsMutuallyExclusive("config", "database-url-file")
	return needs(cmd, "up, status or restored",
		&cobra.Command{
			Use: "up", Short: "Create the schema, or bring it up to date", Args: noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return reached(migrateUp(cmd, file, ownerURL))
			},
		},
		&cobra.Command{
			Use: "status", Short: "Show which migrations the database has", Args: noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return reached(migrateStatus(cmd, file, ownerURL))
			},
		},
		newRestoredCommand(&file, &ownerURL),
	)
}

// reached returns a fault with a remedy if the database cannot be reached or is not ready, and any other error
// unchanged.
func reached(err error) error {
	if err == nil || !pg.IsConnError(err) {
		return err
	}
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the database cannot be reached", fault.Unmet(err.Error()),
		fault.Remedy("start the database, or correct the connection string in the file that was named"), fault.Cause(err))
}

// migration is the database to migrate, and the databases and roles to create first.
type migration struct {
	url       string
	admin     string
	provision *schema.Provisioning
}

func readMigration(file, urlFile string) (migration, error) {
	if urlFile != "" {
		owner, err := config.SecretFile(urlFile).Read()
		return migration{url: owner.Reveal()}, exit.Usage(err)
	}
	if file == "" {
		return migration{}, exit.Usage(errors.New("name the database with --config or --database-url-file"))
	}
	cfg, err := config.Load(migrateConfig{}, config.LoadOptions{File: file, EnvPrefix: "GPUAAS_MIGRATE_"})
	if err != nil {
		return migration{}, exit.Usage(problems(err))
	}
	admin, err := cfg.AdminURLFile.Read()
	if err != nil {
		return migration{}, exit.Usage(err)
	}
	secret, err := cfg.RolePasswordsFile.Read()
	if err != nil {
		return migration{}, exit.Usage(err)
	}
	passwords := map[string]string{}
	if err := yaml.Unmarshal([]byte(secret.Reveal()), &passwords); err != nil {
		return migration{}, exit.Usage(errors.New("role_passwords_file: it is no map of role to password"))
	}
	m := migration{admin: admin.Reveal(), provision: &schema.Provisioning{
		Database: cfg.Database, WorkloadDatabase: cfg.WorkloadDatabase, Passwords: passwords, Exclusive: cfg.Exclusive,
	}}
	// The administrator takes the owner's role, unless the owner may log in by itself.
	m.url, err = withDatabase(m.admin, passwords[pg.RoleOwner], cmp.Or(cfg.Database, pg.DatabaseMesh))
	return m, err
}

func withDatabase(admin, ownerPassword, database string) (string, error) {
	if ownerPassword != "" {
		return pg.WithUser(admin, pg.RoleOwner, ownerPassword, database)
	}
	u, err := url.Parse(admin)
	if err != nil {
		return "", errors.New("admin_url_file: not a connection string")
	}
	u.Path = "/" + database
	return u.String(), nil
}

func migrateUp(cmd *cobra.Command, file, urlFile string) error {
	m, err := readMigration(file, urlFile)
	if err != nil {
		return err
	}
	logger, err := obs.NewLogger(cmd.ErrOrStderr(), obs.LogConfig{})
	if err != nil {
		return err
	}
	if m.provision != nil {
		if err := schema.Provision(cmd.Context(), m.admin, *m.provision); err != nil {
			return err
		}
	}
	applied, err := schema.Migrate(cmd.Context(), m.url, schema.MigrateOptions{Logger: logger})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "up to date: %s applied now\n",
		human.Counted(len(applied.Versions)+applied.River, "migration"))
	return err
}

func migrateStatus(cmd *cobra.Command, file, urlFile string) error {
	m, err := readMigration(file, urlFile)
	if err != nil {
		return err
	}
	return writeStatus(cmd.Context(), cmd, m.url)
}

func writeStatus(ctx context.Context, cmd *cobra.Command, ownerURL string) error {
	status, err := schema.Status(ctx, ownerURL)
	if err != nil {
		return err
	}
	rows := [][]string{{"VERSION", "FILE", "APPLIED"}}
	missing := 0
	for _, s := range status {
		applied := "no"
		if s.Applied {
			applied = s.AppliedAt.UTC().Format("2006-01-02T15:04:05Z")
		} else {
			missing++
		}
		rows = append(rows, []string{strconv.FormatInt(s.Version, 10), s.File, applied})
	}
	if err := output.Rows(cmd.OutOrStdout(), rows); err != nil {
		return err
	}
	if err := writeRollback(ctx, cmd, ownerURL); err != nil {
		return err
	}
	if err := writeSecretKeys(ctx, cmd, ownerURL); err != nil {
		return err
	}
	if missing > 0 {
		are := "are"
		if missing == 1 {
			are = "is"
		}
		return fmt.Errorf("%s %s missing: run `gpuaas migrate up`", human.Counted(missing, "migration"), are)
	}
	return nil
}

// writeSecretKeys prints how many rows need which key of workload_secrets_keys_file.
func writeSecretKeys(ctx context.Context, cmd *cobra.Command, ownerURL string) error {
	uses, err := schema.SecretKeyUses(ctx, ownerURL)
	if err != nil || len(uses) == 0 {
		return err
	}
	const title = "keys of workload secrets that rows need (another one may leave lifecycle's workload_secrets_keys_file):"
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "\n%s\n", title); err != nil {
		return err
	}
	rows := [][]string{{"KEY", "ROWS", "OF"}}
	for _, use := range uses {
		rows = append(rows, []string{use.Key, strconv.FormatInt(use.Rows, 10), use.What})
	}
	return output.Rows(cmd.OutOrStdout(), rows)
}
