package codec

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"regexp"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Connect decodes a request before any interceptor runs, and an error of a codec reaches the client as it is: without a
// Denial, without the correlation id, with names of Go types. The codecs of this package therefore accept every body.
// The message of one that cannot be accepted carries the problem in place of its unknown fields, and the guard, which
// sees every message, refuses it as a typed invalid_argument.

// problemField is the number of the unknown field that carries the problem.
const problemField protowire.Number = 1<<29 - 1

// problemMark begins the problem's text. It is drawn at the start of the process, so that a client cannot send a
// message that has it.
var problemMark = rand.Text()

// Options returns the options with which handlers decode requests: binary, and JSON that refuses unknown fields.
func Options(rules TextRules) []connect.HandlerOption {
	decode := protojson.UnmarshalOptions{}
	return []connect.HandlerOption{
		connect.WithCodec(&codec{name: "proto", rules: rules, unmarshal: proto.Unmarshal}),
		connect.WithCodec(&codec{name: "json", json: true, rules: rules, unmarshal: decode.Unmarshal}),
		connect.WithCodec(&codec{name: "json; charset=utf-8", json: true, rules: rules, unmarshal: decode.Unmarshal}),
	}
}

type codec struct {
	name      string
	json      bool
	rules     TextRules
	unmarshal func([]byte, proto.Message) error
}

// Name implements connect.Codec.
func (c *codec) Name() string { return c.name }

// Marshal implements connect.Codec.
func (c *codec) Marshal(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalAppend saves connect a copy of each message.
func (c *codec) MarshalAppend(dst []byte, message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("encode message: %T is not a protobuf message", message)
	}
	encode := proto.MarshalOptions{}.MarshalAppend
	if c.json {
		encode = protojson.MarshalOptions{}.MarshalAppend
	}
	out, err := encode(dst, m)
	if err != nil {
		return nil, fmt.Errorf("encode message: %w", err)
	}
	return out, nil
}

// Unmarshal implements connect.Codec. A body that cannot be decoded, or whose text breaks the rules, leaves its problem
// in the message.
func (c *codec) Unmarshal(data []byte, message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return fmt.Errorf("decode message: %T is not a protobuf message", message)
	}
	if c.json && len(data) == 0 {
		proto.Reset(m)
		putProblem(m, "the body is empty; a message without fields is {}")
		return nil
	}
	if err := c.unmarshal(data, m); err != nil {
		proto.Reset(m)
		putProblem(m, decodeProblem(err))
		return nil
	}
	if !c.rules.suspicious(data) {
		return nil
	}
	if problem := c.rules.check(m.ProtoReflect()); problem != "" {
		// The request stays in the message: a refusal by role, which comes first, is recorded with it.
		putProblem(m, problem)
	}
	return nil
}

// quoting are the decoding errors that quote the body, and with it perhaps a secret: a refusal is logged. Their first
// group is the part that may be repeated.
var quoting = regexp.MustCompile(
	`(?s)^(syntax error \(line \d+:\d+\)|\(line \d+:\d+\): (?:unexpected token|invalid value
		for (?:string|bytes) field [^\s:]+)).*$`)

// decodeProblem returns the text of a decoding error without the name of the library and the contents of the body, and
// with ordinary spaces.
func decodeProblem(err error) string {
	text := strings.ReplaceAll(err.Error(), "\u00a0", " ")
	text = strings.TrimSpace(strings.TrimPrefix(text, "proto:"))
	text = quoting.ReplaceAllString(text, "$1")
	if strings.Contains(text, "unknown field") || strings.HasPrefix(text, "(line ") {
		return text
	}
	return "the body is no message of this method: " + text
}

func putProblem(m proto.Message, text string) {
	raw := protowire.AppendTag(nil, problemField, protowire.BytesType)
	m.ProtoReflect().SetUnknown(protowire.AppendString(raw, problemMark+text))
}

// Problem returns the refusal of a message that a codec could not accept, nil for any other.
func Problem(message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return nil
	}
	unknown := []byte(m.ProtoReflect().GetUnknown())
	if len(unknown) == 0 || !bytes.Contains(unknown, []byte(problemMark)) {
		return nil
	}
	number, kind, n := protowire.ConsumeTag(unknown)
	if n < 0 || number != problemField || kind != protowire.BytesType {
		return nil
	}
	text, n := protowire.ConsumeString(unknown[n:])
	if n < 0 {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "", fault.Unmet(strings.TrimPrefix(text, problemMark)))
}
