package people

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/rpc"
)

// View is how people are printed.
var View = output.View[*readmodelv1.Person]{
	Name: (*readmodelv1.Person).GetName,
	Columns: []output.Column[*readmodelv1.Person]{
		{Title: "NAME", Path: "name"},
		{Title: "STATE", Path: "state"},
		{Title: "ROLES", Path: "roles"},
		{Title: "TENANT", Drop: 1, Path: "tenant|tenant_id"},
		{Title: "CREATED", Drop: 4, Path: "created_at"},
		{Title: "EXPIRES", Drop: 2, Path: "expires_at"},
		{Title: "ENDED", Drop: 3, Path: "ended_at"},
		{Title: "ID", Path: "person_id", Wide: true},
		{Title: "CREATED BY", Path: "created_by", Wide: true},
		{Title: "ENDED BY", Path: "ended_by", Wide: true},
	},
}

// Command returns the commands about people.
func Command(p *kit.Program) *cobra.Command {
	return kit.Group("people", "People who may call the mesh, their roles and their tokens", []string{"person"},
		createCommand(p), listCommand(p), endCommand(p))
}

func createCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.CreatePersonRequest{}
	var expires, contextName, out string
	cmd := &cobra.Command{
		Use:   "create NAME --role R",
		Short: "Make a person; the token goes into a context or a directory, and is printed nowhere",
		Long: "Make a person. The token is written, readable by you alone, into a context of your contexts file, or with " +
			"--out into a\n" +
			"directory to hand over: contexts.yaml, ca.pem, token, and authorization, a header for curl and buf.\n" +
			"It is printed nowhere and the mesh keeps only its hash. A context of this mesh whose token is good no more " +
			"gives way, as does that of the same\n" +
			"person when the request is repeated with its --idempotency-key; any other stays.\n" +
			"Roles: viewer reads; tenant reads and operates what is its tenant's; operator includes viewer and tenant, and " +
			"operates\n" +
			"the fleet; security includes viewer, and decides about people and identities. You give only what your roles " +
			"include:\n" +
			"a person of the role tenant is made by a person who has operator besides security.",
		Example: "  gpuaas people create ana --role tenant --tenant acme --expires 7d\n" +
			"  gpuaas people create ci --role viewer --expires 30d --out ./ci",
		Args: kit.Args("NAME"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			if len(req.GetRoles()) == 0 {
				return exit.Usage(errors.New("create needs --role, one of " + strings.Join(rpc.Roles(), ", ")))
			}
			req.Name = args[0]
			if expires != "" {
				life, err := parseLife(expires)
				if err != nil {
					return exit.Usage(fmt.Errorf("--expires: %w", err))
				}
				req.ExpiresIn = durationpb.New(life)
			}
			place, err := placeFor(ctx, p, s, req, contextName, out)
			if err != nil {
				return err
			}
			answer, err := s.Client.People.CreatePerson(ctx, req)
			if err != nil {
				return err
			}
			if err := place.write(s.Target, answer.GetToken()); err != nil {
				return withdraw(ctx, s, answer.GetPerson(), err)
			}
			var beside []output.Member
			if place.context != "" {
				beside = append(beside, output.With("context", place.context))
			}
			if place.dir != "" {
				beside = append(beside, output.With("out", place.dir))
			}
			if err := output.One(s.Printer, View, answer.GetPerson(), beside...); err != nil {
				return err
			}
			human.Note(s.Err, "%s", place.next(answer.GetPerson()))
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringSliceVar(
		&req.Roles,
		"role",
		nil,
		"what the person may do: "+strings.Join(rpc.Roles(), ", ")+"; more than once for more (required)",
	)
	flags.StringVar(
		&req.Tenant,
		"tenant",
		"",
		"tenant whose person it is: needed for the role tenant; binds the other roles to it",
	)
	flags.StringVar(&expires, "expires", "", "how long the token is good, from 5m to 30d (default 7d)")
	flags.StringVar(
		&contextName,
		"context-name",
		"",
		"name of the context (default: the current one's, a dash, and NAME)",
	)
	flags.StringVar(
		&req.IdempotencyKey,
		"idempotency-key",
		"",
		"the same request with the same `key` gets the same person, for a day, with a new token in the place of the last one",
	)
	flags.StringVar(&out, "out", "", "directory to write to instead of a context; it must not hold a token already")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(rpc.Roles(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.CompleteTenants)
	return cmd
}

// withdraw ends a new person whose token could not be written.
func withdraw(ctx context.Context, s *kit.Session, made *readmodelv1.Person, cause error) error {
	_, err := s.Client.People.EndPerson(context.WithoutCancel(ctx), &readmodelv1.EndPersonRequest{
		Person: made.GetPersonId(), Reason: "the token could not be written",
	})
	if err != nil {
		return fmt.Errorf(
			"the token of %s could not be written and is lost; end the person with `gpuaas people end %s`: %w",
			made.GetName(),
			made.GetPersonId(),
			errors.Join(cause, err),
		)
	}
	return fmt.Errorf("the token of %s could not be written, so the person was ended again: %w", made.GetName(), cause)
}

// parseLife reads a duration that may be in days.
func parseLife(text string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return 0, fmt.Errorf("%q is not a number of days such as 7d", text)
		}
		return time.Duration(n) * 24 * time.Hour, nil // at most 65535 days
	}
	life, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration such as 7d, 12h or 30m", text)
	}
	return life, nil
}

func listCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	var live bool
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List people with their roles; those that have ended stay for thirty days",
		Example: "  gpuaas people list --live\n  gpuaas people list -o wide",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.Person]{View: View, Fetch: people(s, live)})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().BoolVar(&live, "live", false, "only those who have neither expired nor been ended")
	return cmd
}

// people returns a function that reads a page of the people.
func people(s *kit.Session, live bool) kit.Fetch[*readmodelv1.Person] {
	return kit.Method(s.Client.People.ListPeople, &readmodelv1.ListPeopleRequest{LiveOnly: live})
}

func endCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.EndPersonRequest{}
	cmd := &cobra.Command{
		Use: "end PERSON", Short: "End a person: the token is good no more, and their watches end",
		Long: "End a person. PERSON is the name, the id, or six or more characters that one id begins or ends with.\n" +
			"Requests are refused from then on; watches end at once, or within two seconds where another replica serves " +
			"them.\n" +
			"The person stays listed for thirty days; one who has been ended already stays as they are. A person with the " +
			"role security is ended only if another\n" +
			"has it for a day more.",
		Example: "  gpuaas people end ana --reason 'left the team' --yes", Args: kit.Args("PERSON"),
		ValidArgsFunction: kit.OnlyFirst(completePeople(p)),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Person = args[0]
			found, err := findPerson(ctx, s, args[0])
			if err != nil && !s.Sure { // with --yes the mesh resolves the reference itself
				return err
			}
			if found != nil {
				req.Person = found.GetPersonId()
			}
			if found.GetState() == readmodelv1.PersonState_PERSON_STATE_ENDED {
				human.Note(s.Err, "%s", alreadyEnded(found))
				return output.One(s.Printer, View, found)
			}
			name := cmp.Or(found.GetName(), args[0])
			err = s.Confirmed(ctx, func(context.Context) (kit.Question, error) {
				return kit.Question{Name: name, Lost: []string{"The token of " + name +
					" will be good no more, and what uses it stops working. A new person gets a new token."}}, nil
			})
			if err != nil {
				return err
			}
			return kit.Get(ctx, s, View, s.Client.People.EndPerson, req, (*readmodelv1.EndPersonResponse).GetPerson)
		}),
	}
	kit.ReasonFlag(cmd, &req.Reason, false)
	return kit.Asks(cmd)
}

// alreadyEnded returns the text about when a person was ended, and by whom.
func alreadyEnded(p *readmodelv1.Person) string {
	return fmt.Sprintf("%s was ended already, at %s%s: nothing was changed", human.Clean(p.GetName()),
		p.GetEndedAt().AsTime().UTC().Format(time.RFC3339),
		human.OnlyIf(p.GetEndedBy() != "", " by "+human.Clean(p.GetEndedBy())))
}

// findPerson returns a person as the mesh resolves a reference: by name, where a person who has not been ended takes
// precedence over the one who was ended last, or by six or more characters with which one id begins or ends. It returns
// nil if there is no such person, or more than one.
func findPerson(ctx context.Context, s *kit.Session, ref string) (*readmodelv1.Person, error) {
	all, _, err := kit.Pages(ctx, 0, "", people(s, false))
	if err != nil {
		return nil, err
	}
	var named *readmodelv1.Person
	var matching []*readmodelv1.Person
	part := strings.ReplaceAll(strings.ToLower(ref), "-", "")
	for _, p := range all {
		id := strings.ReplaceAll(p.GetPersonId(), "-", "")
		switch {
		case p.GetName() == strings.ToLower(ref):
			if p.GetState() != readmodelv1.PersonState_PERSON_STATE_ENDED {
				return p, nil
			}
			if named == nil || p.GetEndedAt().AsTime().After(named.GetEndedAt().AsTime()) {
				named = p
			}
		case len(part) >= 6 && (strings.HasPrefix(id, part) || strings.HasSuffix(id, part)):
			matching = append(matching, p)
		}
	}
	if named == nil && len(matching) == 1 {
		return matching[0], nil
	}
	return named, nil
}

// completePeople offers the people who have neither expired nor been ended.
func completePeople(p *kit.Program) kit.Completer {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return p.Complete(cmd, func(ctx context.Context, s *kit.Session) ([]string, error) {
			items, _, err := people(s, true)(ctx, 200, "")
			return kit.TextsOf(items, View.Name), err
		})
	}
}
