"""How every row of listed.py is planted, and the healthy variants. Each family is a file; this one gathers them.

with scene_of(PLANTS["W01"]) as scene:
    scene.desk.run(["gangline", "check", FILE, "--json", *scene.words])
"""

from tests.lab.planted import access, cards, healthy, links, names, software, storage
from tests.lab.planted.scenes import FILE, HEALTHY, PLANTS, Plant, Scene, scene_of

__all__ = ["FAMILIES", "FILE", "HEALTHY", "PLANTS", "Plant", "Scene", "scene_of"]

FAMILIES = (access, names, software, cards, links, storage, healthy)
