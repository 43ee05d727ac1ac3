#!/usr/bin/env python3
"""Rewrites what only nvcc can read in a .cu file, for a C++ compiler: launch_filter.py IN.cu OUT.cpp [OUT.d]

  name<T, 4><<<grid, block>>>(args)   ->  CUDA_ON_CPU_LAUNCH((name<T, 4>), grid, block)(args)
  __shared__ T name[n];               ->  a reference to memory of the running block
  extern __shared__ T name[];         ->  T *name = (T *)cuda_on_cpu::dynamic_shared();

(launch.h says what these are). Lines stay where they are and a #line directive names the source, so messages of the
compiler and the debugger point there. `#include "x.cuh"` of a file beside the source is replaced by that file, filtered
too, once; other files beside it are included by their full path, for the output lies elsewhere. OUT.d gets a rule for
make that names the files read. Comments and strings are never looked into: all searches run on a copy in which they are
blank.
"""

import os
import re
import sys

BLANK = re.compile(
    r'//(?:[^\n\\]|\\.|\\\n)*|/\*.*?\*/|R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'',
    re.S)
INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)"([^"\n]+)"', re.M)
SPECIFIERS = re.compile(r'(?:\b(?:extern|static|const|volatile|(?:alignas|__align__)\s*\([^()]*\))\s*)*\Z')
ALIGNMENT = re.compile(r'\b(?:alignas|__align__)\s*\(')


class Error(Exception):
    pass


def blank_out(text):
    """The text with comments, strings and characters as spaces; a digit separator (1'000) is no quote."""
    def spaces(match):
        before = text[match.start() - 1:match.start()]
        if match.group().startswith("'") and before.isalnum() and before not in 'uUL':
            return match.group()
        return re.sub(r'[^\n]', ' ', match.group())
    return BLANK.sub(spaces, text)


def without_comments(text):
    """On one line, comments and line breaks as spaces."""
    text = BLANK.sub(lambda m: ' ' if m.group().startswith('/') else m.group(), text)
    return ' '.join(text.replace('\\\n', ' ').split())


def line_breaks(text):
    """Those of the text, so that what follows stays on its line; in a macro with their backslashes."""
    return ''.join(re.findall(r'\\?\n', text))


def line_of(text, at):
    return text.count('\n', 0, at) + 1


def closing(text, at):
    """Where the bracket opened at `at` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in '([{') - (text[i] in ')]}')
        if depth == 0:
            return i
    raise Error(f'{line_of(text, at)}: this bracket is not closed')


def outside_brackets(text):
    """The text without what is in brackets, those of template arguments too."""
    depth, out = 0, ''
    for c in text:
        depth -= c in ')]}>'
        out += c if depth == 0 else ''
        depth += c in '([{<'
    return out


def kernel_begin(text, end):
    """Where the kernel's name that ends at `end` begins: ns::name<template arguments>."""
    i = end
    while text[i - 1].isspace():
        i -= 1
    if text[i - 1] == '>':
        depth = parentheses = 0
        while True:
            i -= 1
            if i <= 0:
                raise Error(f'{line_of(text, end)}: no kernel before <<<')
            parentheses += (text[i] in ')]}') - (text[i] in '([{')
            if parentheses == 0 and text[i] in '<>':
                depth += 1 if text[i] == '>' else -1
                if depth == 0:
                    break
        while text[i - 1].isspace():
            i -= 1
    begin = i
    while begin > 0 and (text[begin - 1].isalnum() or text[begin - 1] in '_:'):
        begin -= 1
    if begin == i:
        raise Error(f'{line_of(text, end)}: no kernel before <<<')
    return begin


def configuration_end(text, begin):
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in '([{') - (text[i] in ')]}')
        if depth == 0 and text.startswith('>>>', i):
            return i
    raise Error(f'{line_of(text, begin)}: no >>> after <<<')


def launch(text, blank, at):
    """The launch whose <<< is at `at`: its begin, its end, and what to write instead (the arguments stay)."""
    begin = kernel_begin(blank, at)
    end = configuration_end(blank, at + 3)
    kernel = without_comments(text[begin:at])
    configuration = without_comments(text[at + 3:end])
    lines = line_breaks(text[begin:end])
    return begin, end + 3, f'CUDA_ON_CPU_LAUNCH(({kernel}), {configuration}){lines}'


def shared(text, blank, at):
    """The declaration whose __shared__ is at `at`: its begin, its end (before the semicolon), and what to write.

    A static variable that describes it is one per function and, in a template, per instance; so is the memory then.
    """
    end = blank.find(';', at)
    begin = SPECIFIERS.search(blank, max(0, at - 200), at).start()
    where = line_of(text, at)
    declaration = without_comments(text[begin:end]).replace('__shared__', ' ').strip()
    alignment = None
    found = ALIGNMENT.search(declaration)
    if found:
        stop = closing(declaration, found.end() - 1)
        alignment = declaration[found.end():stop]
        declaration = (declaration[:found.start()] + declaration[stop + 1:]).strip()
    dynamic = re.match(r'extern\b', declaration) is not None
    declaration = re.sub(r'^(extern|static)\b', '', declaration).strip()
    parts = re.match(r'(?P<type>.*?[\s*>])(?P<name>\w+)\s*(?P<dimensions>(\[.*\])?)$', declaration)
    if not parts or re.search('[,=]', outside_brackets(declaration)):
        raise Error(f'{where}: one variable without initial value per __shared__ declaration, please')
    kind, name, dimensions = parts['type'].strip(), parts['name'], parts['dimensions'].strip()
    lines = line_breaks(text[begin:end])
    if dynamic:
        if not re.fullmatch(r'\[\s*\]', dimensions):
            raise Error(f'{where}: extern __shared__ declares an array of unknown size: T {name}[]')
        return begin, end, f'{kind} *{name} = ({kind} *)cuda_on_cpu::dynamic_shared(){lines}'
    type_name, variable = name + '_shared_type', name + '_shared_variable'
    alignment = alignment or f'alignof({type_name})'
    return begin, end, (
        f'typedef {kind} {type_name}{dimensions}; static const cuda_on_cpu::SharedVariable {variable} = '
        f'{{"{name}", sizeof({type_name}), {alignment}}}; '
        f'{type_name} &{name} = *({type_name} *)cuda_on_cpu::shared_address({variable}){lines}')


def rewrite(text):
    blank = blank_out(text)
    out, done = [], 0
    for match in re.finditer(r'<<<|\b__shared__\b', blank):
        if match.start() < done:
            continue
        begin, end, instead = (launch if match.group() == '<<<' else shared)(text, blank, match.start())
        out += [text[done:begin], instead]
        done = end
    return ''.join(out) + text[done:]


def filtered(path, seen):
    """The rewritten text of a file, with those it includes."""
    with open(path, encoding='utf-8') as f:
        text = f.read()
    try:
        text = rewrite(text)
    except Error as error:
        raise Error(f'{path}:{error}') from None
    blank = blank_out(text)

    def include(match):
        other = os.path.abspath(os.path.join(os.path.dirname(path), match[2]))
        if not blank[match.start():match.end()].lstrip().startswith('#') or not os.path.exists(other):
            return match[0]
        if not other.endswith('.cuh'):
            return f'{match[1]}"{other}"'
        if other in seen:
            return ''
        seen.add(other)
        return f'{filtered(other, seen)}\n#line {line_of(text, match.end())} "{path}"\n'
    return f'#line 1 "{path}"\n' + INCLUDE.sub(include, text)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit('usage: launch_filter.py IN.cu OUT.cpp [OUT.d]')
    source, target = sys.argv[1:3]
    included = set()
    try:
        text = filtered(source, included)
    except Error as error:
        sys.exit(f'launch_filter.py: {error}')
    with open(target, 'w', encoding='utf-8') as f:
        f.write(text)
    if len(sys.argv) == 4:
        with open(sys.argv[3], 'w', encoding='utf-8') as f:
            f.write(f'{target}: {" ".join([source] + sorted(included))}\n')


if __name__ == '__main__':
    main()
