"""Which prefixes have a state in the ring: a radix tree over their bytes, bounded, the least recently used goes first."""

from collections import OrderedDict


class Node:
    __slots__ = ("edge", "children", "parent", "seq_id")

    def __init__(self, edge, parent):
        self.edge, self.parent = edge, parent      # the bytes between parent and here
        self.children = {}                         # first byte of the edge -> node
        self.seq_id = None                         # the sequence in the ring that has seen exactly these bytes


class Prefixes:
    """`find` the longest kept prefix, `keep` a sequence; what no longer fits is handed to `release(seq_id)`."""

    def __init__(self, most, release):
        self.most, self.release = most, release
        self.root = Node(b"", None)
        self.used = OrderedDict()                  # node -> None, least recently used first

    def __len__(self):
        return len(self.used)

    def find(self, text):
        """(n, seq_id) of the longest kept prefix of `text`, (0, None) if none."""
        best, node, at, depth = None, self.root, 0, 0
        while node is not None:
            if node.seq_id is not None:
                best, depth = node, at
            node = node.children.get(text[at]) if at < len(text) else None
            if node is not None and not text.startswith(node.edge, at):
                break
            at += len(node.edge) if node is not None else 0
        if best is None:
            return 0, None
        self.used.move_to_end(best)
        return depth, best.seq_id

    def keep(self, text, seq_id):
        """seq_id has seen exactly `text`, at least a byte; it belongs to the store from now on."""
        node = self._node(bytes(text))
        if node.seq_id is not None:
            self.release(seq_id)                   # it is there already
        else:
            node.seq_id = seq_id
        self.used[node] = None
        self.used.move_to_end(node)
        self.make_room(0)

    def has(self, text):
        return self.find(text)[0] == len(text)

    def make_room(self, n):
        """Evict until n more can be kept."""
        while len(self.used) + n > self.most:
            self.evict()

    def evict(self):
        """Give the least recently used state back."""
        node, _ = self.used.popitem(last=False)
        self.release(node.seq_id)
        node.seq_id = None
        self._prune(node)

    def _node(self, text):
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = Node(text[at:], node)
                return child
            n = common(child.edge, text, at)
            if n < len(child.edge):
                child = self._split(child, n)
            node, at = child, at + n
        return node

    def _split(self, node, n):
        middle = Node(node.edge[:n], node.parent)
        node.parent.children[node.edge[0]] = middle
        node.edge, node.parent = node.edge[n:], middle
        middle.children[node.edge[0]] = node
        return middle

    def _prune(self, node):
        """Nodes without a state are there for their children's sake alone."""
        while node.parent is not None and node.seq_id is None and len(node.children) < 2:
            parent = node.parent
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[0]] = child
                return
            del parent.children[node.edge[0]]
            node = parent


def common(edge, text, at):
    """How many bytes of `edge` are at text[at:]."""
    n = min(len(edge), len(text) - at)
    return next((i for i in range(n) if edge[i] != text[at + i]), n)
