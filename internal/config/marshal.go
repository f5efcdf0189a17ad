package config

import (
	"encoding"
	"fmt"
	"reflect"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Marshal returns a configuration as the YAML that Load reads back to the same value, with every key, in the order of
// the struct.
func Marshal[T any](c T) ([]byte, error) {
	s, problems := schemaOf(&c)
	if len(problems) > 0 {
		return nil, fmt.Errorf("marshal configuration: %w", problems[0])
	}
	root := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range s.fields {
		value, err := plain(f.value)
		if err != nil {
			return nil, fmt.Errorf("marshal configuration: %s: %w", f.key, err)
		}
		if value == nil {
			continue
		}
		var node yaml.Node
		if err := node.Encode(value); err != nil {
			return nil, fmt.Errorf("marshal configuration: %s: %w", f.key, err)
		}
		put(root, strings.Split(f.key, "."), &node)
	}
	return yaml.Marshal(root)
}

func put(m *yaml.Node, path []string, value *yaml.Node) {
	if len(path) > 1 {
		for i := 0; i+1 < len(m.Content); i += 2 {
			if m.Content[i].Value == path[0] {
				put(m.Content[i+1], path[1:], value)
				return
			}
		}
		child := &yaml.Node{Kind: yaml.MappingNode}
		m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: path[0]}, child)
		put(child, path[1:], value)
		return
	}
	m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: path[0]}, value)
}

// plain returns a value in a form that YAML can express: text for durations and for types with a text form, maps for
// structs inside lists and maps.
func plain(v reflect.Value) (any, error) {
	if v.Type() == durationType {
		return time.Duration(v.Int()).String(), nil
	}
	if m, ok := v.Interface().(encoding.TextMarshaler); ok {
		text, err := m.MarshalText()
		return string(text), err
	}
	switch v.Kind() { // scalars are as they are
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil, nil
		}
		return plain(v.Elem())
	case reflect.Slice, reflect.Array:
		out := make([]any, v.Len())
		for i := range v.Len() {
			item, err := plain(v.Index(i))
			if err != nil {
				return nil, err
			}
			out[i] = item
		}
		return out, nil
	case reflect.Map:
		if v.IsNil() {
			return nil, nil
		}
		out := map[string]any{}
		for it := v.MapRange(); it.Next(); {
			item, err := plain(it.Value())
			if err != nil {
				return nil, err
			}
			out[it.Key().String()] = item
		}
		return out, nil
	case reflect.Struct:
		out := map[string]any{}
		for i := range v.NumField() {
			sf := v.Type().Field(i)
			name, _, _ := strings.Cut(sf.Tag.Get("koanf"), ",")
			if !sf.IsExported() || name == "-" {
				continue
			}
			if name == "" {
				name = snake(sf.Name)
			}
			item, err := plain(v.Field(i))
			if err != nil {
				return nil, err
			}
			out[name] = item
		}
		return out, nil
	default:
		return v.Interface(), nil
	}
}
